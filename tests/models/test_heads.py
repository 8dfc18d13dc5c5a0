"""What the classifier of pairs sees."""

import torch

from lra.models.heads import PairClassifier, classifier


def test_a_classifier_has_one_hidden_layer_of_its_width():
    head = classifier(4, 16, 3)
    state, x = head.state_dict(), torch.randn(5, 4)
    assert {name: list(value.shape) for name, value in state.items()} == {
        "0.weight": [16, 4], "0.bias": [16], "2.weight": [3, 16], "2.bias": [3]
    }  # fmt: skip
    hidden = (x @ state["0.weight"].T + state["0.bias"]).clamp(min=0)
    torch.testing.assert_close(head(x), hidden @ state["2.weight"].T + state["2.bias"])


def test_a_linear_classifier_has_one_layer():
    head, x = classifier(4, None, 3), torch.randn(5, 4)
    weight, bias = head.parameters()
    torch.testing.assert_close(head(x), x @ weight.T + bias)
    assert PairClassifier(4, None, 3)(torch.randn(10, 4)).shape == (5, 3)


def test_the_difference_of_a_pair_is_seen_with_its_sign_or_without():
    torch.manual_seed(0)
    pair = torch.randn(2, 4)
    for absolute in (False, True):
        head = PairClassifier(4, 16, 3, absolute)
        seen: list[torch.Tensor] = []
        head.classifier.register_forward_hook(lambda module, args, out, seen=seen: seen.append(args[0]))
        assert head(pair).shape == (1, 3)
        x, y = pair
        expected = torch.cat([x, y, x * y, (x - y).abs() if absolute else x - y])
        assert torch.equal(seen[0], expected[None])


def test_that_texts_with_much_in_common_are_alike_is_learned_from_the_absolute_difference():
    """Two of eight kinds whose encodings differ little from a large mean: after as many steps only one head knows."""
    assert after(300, absolute=True) < 0.5 * after(300, absolute=False)


def after(steps: int, absolute: bool) -> float:
    """The loss, in nats, of telling pairs of one kind from others."""
    torch.manual_seed(0)
    kinds, loss = 2 + 0.2 * torch.randn(8, 32), torch.tensor(0.0)
    head = PairClassifier(32, 32, 2, absolute)
    optimizer = torch.optim.AdamW(head.parameters(), 1e-3)
    for _ in range(steps):
        which = torch.randint(8, (64, 2))
        alike = torch.rand(64) < 0.5
        which[alike, 1] = which[alike, 0]
        label = (which[:, 0] == which[:, 1]).long()
        loss = torch.nn.functional.cross_entropy(head(kinds[which].flatten(0, 1)), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
