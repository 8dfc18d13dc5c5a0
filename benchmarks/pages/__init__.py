"""The pages that are made of registries, sources and measurements. Each module here makes some of them."""
