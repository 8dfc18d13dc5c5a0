"""Data sets of the Hub: a Hub that is slow, refuses or is away, what is cached, and folders of any name."""

import errno
import http.server
import json
import os
import shutil
import ssl
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lra.data import hub
from lra.errors import UsageError
from tests.fixtures import IMDB_CARD, write_imdb

NAME, COMMIT = "stanfordnlp/imdb", "e6281661ce1c48d982bc483cf8a173c1bbeb5d31"
COLUMNS = {"text": ["good", "bad", "fine"], "label": [1, 0, 1]}
EXPECTED = {"train": COLUMNS, "test": COLUMNS}


def mirror(folder: Path) -> Path:
    return write_imdb(folder, train=COLUMNS, test=COLUMNS)


def load(source: str | Path = NAME, notes: list[str] | None = None):
    """The rows of each split; `notes` gets what is to be known of them."""
    note = ([] if notes is None else notes).append
    splits = hub.load_splits(source, name="IMDB", columns=("text", "label"), mend="lra data prepare …", note=note)
    return {
        split: {name: [value for batch in batches for value in batch[name]] for name in COLUMNS}
        for split, batches in ((split, list(batches)) for split, batches in splits.items())
    }


def refused(source: str | Path = NAME) -> str:
    with pytest.raises(UsageError) as caught:
        load(source)
    said = str(caught.value)
    assert "\n" not in said and not {"corrupt", "damaged", "remove"} & set(said.split())
    return said


class Hub:
    """A Hub of one data set in a thread. `answer` may answer a request (handler, path) otherwise; true if it did."""

    def __init__(self, files: Path):
        self.asked: list[str] = []
        self.answer = lambda handler, path: False
        names = [path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()]
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = self.path.partition("?")[0]
                outer.asked.append(path)
                if outer.answer(self, path):
                    return
                _, resolves, name = path.partition("/resolve/")
                name = name.partition("/")[2]
                if path.startswith(f"/api/datasets/{NAME}") and "/tree/" not in path:
                    siblings = [{"rfilename": name} for name in names]
                    self.send(200, json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
                elif resolves and name in names:
                    self.send(200, (files / name).read_bytes(), ETag=f'"{name.replace("/", "-")}"')
                else:
                    self.send(404, b"{}")

            do_HEAD = do_CONNECT = do_GET

            def send(self, status: int, body: bytes = b"", **headers: str) -> bool:
                self.send_response(status)
                for key, value in {"Content-Length": str(len(body)), "X-Repo-Commit": COMMIT, **headers}.items():
                    self.send_header(key, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
                return True

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.address = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of the Hub, and of `datasets`."""
    import datasets.config
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache" / "hub"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache" / "datasets")
    return tmp_path / "cache" / "hub"


@pytest.fixture
def online(cache, monkeypatch):
    """Sends the Hub's client to an address."""
    from huggingface_hub import constants, utils

    def forget() -> None:
        getattr(utils, "close_session", lambda: None)()  # it keeps the proxies that it began with

    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def go(endpoint: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    forget()
    yield go
    forget()


@pytest.fixture
def served(tmp_path, online):
    made = Hub(mirror(tmp_path / "served"))
    online(f"http://{made.address}")
    yield made
    made.server.shutdown()


def fill(cache: Path, folder: Path, *, main: bool = True) -> Path:
    """The cache as `hf download` fills it; without `main`, as it does of a revision given by its hash."""
    there = cache / f"datasets--{NAME.replace('/', '--')}"
    snapshot = there / "snapshots" / COMMIT
    for path in (path for path in folder.rglob("*") if path.is_file()):
        blob, link = there / "blobs" / path.name, snapshot / path.relative_to(folder)
        blob.parent.mkdir(parents=True, exist_ok=True)
        link.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, blob)
        link.symlink_to(blob)
    if main:
        (there / "refs").mkdir()
        (there / "refs/main").write_text(COMMIT)
    return snapshot


def test_a_download_asks_for_the_data_set_alone_and_stays(served):
    notes: list[str] = []
    assert load(notes=notes) == EXPECTED and not notes
    assert all(NAME in path for path in served.asked if "agent" not in path)  # no probe of the Hub itself
    served.answer = lambda handler, path: handler.send(503)
    assert load(notes=notes) == EXPECTED  # the copy
    assert len(notes) == 1 and "HTTP 503" in notes[0] and "in the Hub's cache was read" in notes[0]
    rows = hub.load_splits(NAME, name="IMDB", columns=("label",), mend="", note=notes.append)["train"]
    assert len(rows) == 3 and list(rows) == list(rows) == [{"label": COLUMNS["label"]}]


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (403, "HTTP 403: ask for access"),
        (404, "there is no such folder, and .* has no such data set"),
        (429, "HTTP 429: too many requests, wait"),
        (500, "HTTP 500: try again later"),
        (503, "HTTP 503: try again later"),
    ],
)
def test_what_the_hub_answers_is_told(served, status, said):
    served.answer = lambda handler, path: handler.send(status)
    with pytest.raises(UsageError, match=f"^cannot load IMDB from {NAME} .*{said}.*; no copy is in .*/hub"):
        load()


@pytest.mark.parametrize("token", [None, "hf_wrong"])
def test_a_wrong_token_is_told_from_a_data_set_that_is_not_there(served, monkeypatch, token):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    served.answer = lambda handler, path: handler.send(401)
    assert ("unset HF_TOKEN" if token else "no such data set") in refused()


def test_a_hub_that_answers_too_late(served, monkeypatch):
    from huggingface_hub import constants

    wait = threading.Event()
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)
    served.answer = lambda handler, path: wait.wait(30)
    assert "does not answer within 0.2 s: set HF_HUB_ETAG_TIMEOUT" in refused()
    wait.set()


def test_a_page_instead_of_the_hub(served):
    served.answer = lambda handler, path: handler.send(200, b"<html>Please log in</html>")
    assert "is not the Hub" in refused()


def test_a_connection_that_breaks(served):
    def close(handler, _):
        handler.close_connection = True
        handler.connection.close()
        return True

    served.answer = close
    assert "broke: the same command again goes on" in refused()


def test_a_download_that_ended_halfway_is_finished_and_told_where_it_can_not_be(served):
    served.answer = lambda handler, path: "/test-" in path and handler.send(403)
    assert "the copy in the Hub's cache is not whole: " in refused() and "plain_text/test-*" in refused()
    served.answer = lambda handler, path: False
    assert load() == EXPECTED


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize(("status", "said"), [(407, "password into HTTPS_PROXY"), (403, "ask who runs the network")])
def test_what_a_proxy_answers_is_told_without_its_password(served, online, monkeypatch, secure, status, said):
    served.answer = lambda handler, path: handler.send(status)
    online(f"http{'s' * secure}://hub.example")
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://me:secret@{served.address}")
    told = refused()
    assert f"the proxy {served.address}" in told and str(status) in told and said in told and "secret" not in told


def test_a_name_that_is_not_known_and_a_port_where_nobody_listens(online):
    online("http://hub.invalid")
    assert "the Hub does not answer: hub.invalid is not known here" in refused()
    online("http://127.0.0.1:9")
    assert "the Hub does not answer at http://127.0.0.1:9: " in refused()


def test_an_endpoint_that_is_no_address(online):
    online("hub.example")
    assert "HF_ENDPOINT=hub.example is not an address" in refused()


def test_a_proxy_that_is_no_address(online, monkeypatch):
    online("https://hub.example")
    monkeypatch.setenv("HTTPS_PROXY", "ftp://me:secret@127.0.0.1:9")
    told = refused()
    assert "the proxy 127.0.0.1:9 can't be used (" in told and "http://<host>:<port>" in told and "secret" not in told


def test_a_connection_that_is_not_secure(served, online):
    online(f"https://{served.address}")
    assert "no secure connection" in refused() and "SSL_CERT_FILE" in refused()


def test_the_number_of_an_error_of_tls_is_none_of_the_operating_system():
    from lra.data import hub_errors

    error = ssl.SSLCertVerificationError(errno.EPERM, "certificate verify failed")
    assert "no secure connection" in hub_errors.explain_failure(error)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
@pytest.mark.parametrize("main", [True, False])
def test_a_cache_that_was_filled_before_is_enough(served, tmp_path, cache, monkeypatch, variable, main):
    monkeypatch.setenv(variable, "1")
    assert f"({variable} is set; no copy is in {cache})" in refused()
    snapshot = fill(cache, mirror(tmp_path / "copy"), main=main)
    assert load() == EXPECTED and not served.asked
    (snapshot / "plain_text/test-00000-of-00001.parquet").unlink()
    assert (
        f"{variable} is set; the copy in the Hub's cache is not whole: {snapshot} has no plain_text/test-*" in refused()
    )


def test_the_revision_of_main_is_read_from_the_cache(tmp_path, cache):
    fill(cache, mirror(tmp_path / "copy"))
    other = cache / f"datasets--{NAME.replace('/', '--')}/snapshots/{'0' * 40}"
    write_imdb(other, train={"text": ["other"], "label": [0]}, test=COLUMNS)
    assert load() == EXPECTED


def test_what_datasets_has_cached_in_its_own_form_is_enough(tmp_path, cache, monkeypatch):
    import datasets

    rows = datasets.DatasetDict({split: datasets.Dataset.from_dict(COLUMNS) for split in ("train", "test")})
    monkeypatch.setattr(datasets, "load_dataset", lambda source, config: rows if source == NAME else None)
    assert load() == EXPECTED


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_may_not_be_written(served, cache, tmp_path, monkeypatch, number):
    def fails(*_, **__):
        raise OSError(number, os.strerror(number), str(cache))

    monkeypatch.setattr("huggingface_hub.hf_hub_download", fails)
    assert f"{cache} can't be used: {os.strerror(number)}; set HF_HOME" in refused()
    fill(cache, mirror(tmp_path / "copy"))
    assert load() == EXPECTED


@pytest.mark.parametrize(
    "name",
    ["data[v1]", "a*b?", "50% of it", "@home#1", "größe 映画", "{x}", "~", "a::b", "https:", "'quoted\"", "!$", "..."],
)
def test_a_folder_of_any_name(tmp_path, monkeypatch, name):
    made = mirror(tmp_path / name / "imdb")
    assert load(made) == load(f"{made}/") == EXPECTED
    monkeypatch.chdir(tmp_path / name)
    assert load("imdb") == load("../" + name + "/imdb/.") == EXPECTED
    (tmp_path / "link").symlink_to(made)
    assert load(tmp_path / "link") == EXPECTED


def test_a_folder_from_a_mac(tmp_path):
    made = mirror(tmp_path / "imdb")
    (made / ".DS_Store").write_bytes(b"\0" * 9)
    for path in [path for path in made.rglob("*") if path.is_file()]:
        path.with_name(f"._{path.name}").write_bytes(b"\0\5\x16\7")
    assert load(made) == EXPECTED


def test_what_is_no_folder(tmp_path):
    (tmp_path / "imdb.zip").write_bytes(b"PK")
    assert "it is a file; name the folder that holds it" in refused(tmp_path / "imdb.zip")
    for source in (tmp_path / "none", "~nobody-of-this-name/imdb", "a b", "./imdb", "data[v1]/imdb"):
        assert "there is no such folder" in refused(source)


def test_files_of_which_some_are_missing(tmp_path):
    made = mirror(tmp_path / "imdb")
    part = made / "plain_text/train-00000-of-00001.parquet"
    part.rename(part.with_name("train-00000-of-00002.parquet"))
    assert "has 1 of the 2 files train-*" in refused(made)
    pq.write_table(pa.table(COLUMNS), part.with_name("train-00001-of-00002.parquet"))
    assert load(made)["train"] == {name: values * 2 for name, values in COLUMNS.items()}


@pytest.mark.parametrize("card", ["", "---\n- a\n---\n", "---\nconfigs: 3\n---\n", "---\n\t- [\n---\n", IMDB_CARD[:60]])
def test_a_card_that_names_no_files(tmp_path, card):
    made = mirror(tmp_path / "imdb")
    (made / "README.md").write_text(card)
    assert "README.md does not name the files of plain_text" in refused(made)
    (made / "README.md").unlink()
    assert "there is no " in refused(made)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE, errno.EACCES])
@pytest.mark.parametrize("file", ["README.md", "train-00000-of-00001.parquet"])
def test_a_file_that_can_not_be_read_is_not_called_another(tmp_path, monkeypatch, number, file):
    made, whole = mirror(tmp_path / "imdb"), Path.open

    def fails(self, *args, **options):
        if self.name == file:
            raise OSError(number, os.strerror(number), str(self))
        return whole(self, *args, **options)

    monkeypatch.setattr(Path, "open", fails)
    with pytest.raises(OSError) as caught:
        load(made)
    assert caught.value.errno == number and caught.value.filename.endswith(file)
