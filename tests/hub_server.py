"""A stand-in for the Hub: the part of its HTTP interface by which its client finds, downloads and uploads models."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
import urllib.parse
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest


@dataclass
class Model:
    """A repository: the files of each commit, and the commit of each branch."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Adds files to a branch. Returns the new commit."""
        there = self.commits.get(self.branches.get(branch, self.branches.get("main", "")), {}) | files
        said = repr(sorted((name, hashlib.sha1(content).hexdigest()) for name, content in there.items()))
        sha = hashlib.sha1(f"{branch} {len(self.commits)} {said}".encode()).hexdigest()
        self.commits[sha], self.branches[branch] = there, sha
        return sha


class HubServer:
    """Answers in a thread. `token` is the one that may write, and read what is private."""

    token = "hf_of_the_test"

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.asked: list[str] = []  # method and path of each request
        self.stored: dict[str, bytes] = {}  # large files by their SHA-256, before a commit names them
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def respond(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                path = urllib.parse.unquote(self.path.partition("?")[0])
                outer.asked.append(f"{self.command} {path}")
                known = self.headers.get("Authorization") == f"Bearer {outer.token}"
                status, body, headers = outer.answer(self.command, path, self.rfile.read(size), known)
                content = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(content)), **headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = respond

            def log_message(self, *_: Any) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, method: str, path: str, body: bytes, known: bool) -> tuple[int, Any, dict[str, str]]:
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}, {}
        if path == "/api/repos/create":
            return self._create(json.loads(body), known)
        if path.startswith("/stored/"):
            self.stored[path.rpartition("/")[2]] = body
            return 200, b"", {}
        parts = path.removeprefix("/api/models").strip("/").split("/")
        name, rest = "/".join(parts[:2]).removesuffix(".git"), parts[2:]
        model = self.models.get(name)
        if model is None or (model.private and not known):
            return 401, {"error": "Invalid username or password."}, {"X-Error-Code": "RepoNotFound"}
        if method == "POST":
            return self._write(model, name, rest, body) if known else (403, {"error": "no write access"}, {})
        return self._read(model, name, rest, known)

    def _create(self, asked: dict[str, Any], known: bool) -> tuple[int, Any, dict[str, str]]:
        if not known:
            return 401, {"error": "Invalid username or password."}, {}
        name = "/".join(part for part in (asked.get("organization"), asked["name"]) if part)
        if name in self.models:
            return 409, {"url": f"{self.address}/{name}"}, {}
        private = asked.get("private") or asked.get("visibility") == "private"
        self.models[name] = Model(private=bool(private))
        self.models[name].commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        return 200, {"url": f"{self.address}/{name}"}, {}

    def _read(self, model: Model, name: str, rest: list[str], known: bool) -> tuple[int, Any, dict[str, str]]:
        kind, *where = rest or [""]
        if kind == "resolve":
            *_, file = where
            revision = "/".join(where[:-1])
        else:
            revision, file = "/".join(where) or "main", ""
        sha = model.branches.get(revision, revision)
        if sha not in model.commits:
            return 404, {"error": "Invalid rev id"}, {"X-Error-Code": "RevisionNotFound"}
        files = model.commits[sha]
        if kind != "resolve":
            siblings = [{"rfilename": each} for each in files]
            return 200, {"id": name, "sha": sha, "private": model.private, "siblings": siblings}, {}
        if model.gated and not known:
            return 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"}
        if file not in files:
            return 404, {"error": "no such file"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": sha}
        etag = f'"{hashlib.sha256(files[file]).hexdigest()}"'
        return 200, files[file], {"ETag": etag, "X-Repo-Commit": sha}

    def _write(self, model: Model, name: str, rest: list[str], body: bytes) -> tuple[int, Any, dict[str, str]]:
        kind, *where = rest
        branch = "/".join(where)
        if kind == "branch":
            if branch in model.branches:
                return 409, {"error": "there already"}, {}
            model.branches[branch] = model.branches["main"]
            return 200, {}, {}
        if kind == "preupload":
            files = [{"path": each["path"], "uploadMode": self._mode(each["path"]), "shouldIgnore": False}
                for each in json.loads(body)["files"]]  # fmt: skip
            return 200, {"files": files}, {}
        if kind == "info":  # info/lfs/objects/batch
            objects = [
                {"oid": each["oid"], "size": each["size"],
                 "actions": {"upload": {"href": f"{self.address}/stored/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]  # fmt: skip
            return 200, {"transfer": "basic", "objects": objects}, {}
        assert kind == "commit", rest
        files = {}
        for line in map(json.loads, body.splitlines()):
            content = line["value"]
            if line["key"] == "file":
                files[content["path"]] = base64.b64decode(content["content"])
            elif line["key"] == "lfsFile":
                files[content["path"]] = self.stored[content["oid"]]
        sha = model.commit(files, branch)
        return 200, {"success": True, "commitOid": sha, "commitUrl": f"{self.address}/{name}/commit/{sha}"}, {}

    @staticmethod
    def _mode(path: str) -> str:
        return "lfs" if path.endswith(".safetensors") else "regular"


def hub_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> HubServer:
    """Starts a Hub and sends its client there, with an empty cache in a folder and without a token."""
    from huggingface_hub import constants, utils

    from lra.training import hub_weights

    server = HubServer()
    for name in (
        "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "HF_TOKEN", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"
    ):  # fmt: skip
        monkeypatch.delenv(name, raising=False)
    for name, value in {
        "HF_HUB_OFFLINE": False, "HF_HUB_CACHE": str(folder), "HF_HUB_DISABLE_XET": True, "ENDPOINT": server.address,
        "HF_TOKEN_PATH": str(folder / "token"),
    }.items():  # fmt: skip
        monkeypatch.setattr(constants, name, value)
    for module in ("constants", "file_download"):  # older clients read it there
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"huggingface_hub.{module}.HUGGINGFACE_CO_URL_TEMPLATE", template, raising=False)
    monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", server.address)
    getattr(utils, "close_session", lambda: None)()  # it keeps the proxies that it began with
    hub_weights.fetch_weights.cache_clear()
    return server
