"""Why the Hub could not be reached, in words that name the mend."""

from __future__ import annotations

import errno
import re
import socket
import ssl
import urllib.parse
import urllib.request
from collections.abc import Iterator

from lra.errors import first_line, name_error, system_error

MENDS = {  # by HTTP status
    403: "ask for access on its page there, or ask who runs the network, if a proxy forbids it",
    407: "put the proxy's user and password into HTTPS_PROXY",
    429: "too many requests, wait some minutes",
}
# classes of the HTTP libraries that the Hub's client has used, by what they mean
_SLOW = {"TimeoutException", "Timeout", "TimeoutError"}
_CUT = {"ReadError", "RemoteProtocolError", "ProtocolError", "ChunkedEncodingError", "IncompleteRead"}
_NO_ADDRESS = {"UnsupportedProtocol", "MissingSchema", "InvalidSchema"}
_AWAY = {"NetworkError", "ConnectError", "ConnectionError", "NewConnectionError"}


def explain_failure(error: BaseException, kind: str = "data set") -> str:
    """Why a download or an upload failed, from the error of the Hub's client.

    Args:
        kind: what was asked for.
    """
    import huggingface_hub
    from huggingface_hub import constants

    chain = list(_chain(error))
    kinds = {kind.__name__ for each in chain for kind in type(each).__mro__}
    endpoint, host = constants.ENDPOINT, urllib.parse.urlsplit(constants.ENDPOINT).hostname
    proxy = _proxy(constants.ENDPOINT)
    through = f" through the proxy {proxy}" if proxy else ""
    if refused := next((each for each in chain if type(each).__name__ == "ProxyError"), None):
        code = re.search(r"\b[45]\d\d\b", " ".join(map(str, chain)))
        return f"the proxy {proxy} refuses, {first_line(refused)}: {_mend(int(code[0]) if code else 0)}"
    if status := next((code for each in chain if (code := _status(each))), None):
        if status == 401 and huggingface_hub.get_token():
            return "the Hub does not accept the token (HTTP 401): log in again with hf auth login, or unset HF_TOKEN"
        if status in (401, 404):
            here = "there is no such folder, and " if kind == "data set" else ""
            return f"{here}{endpoint} has no such {kind} for everybody (HTTP {status})"
        return f"{endpoint}{through} answers HTTP {status}: {_mend(status)}"
    if certificate := next((each for each in chain if isinstance(each, ssl.SSLError)), None):
        mend = "if a proxy signs for others, name its certificate in SSL_CERT_FILE"
        return f"no secure connection to {endpoint}{through} ({first_line(certificate)}): {mend}"
    if any(isinstance(each, socket.gaierror) for each in chain):
        name = proxy or host
        return f"the Hub does not answer: {name} is not known here; connect the machine, or set HTTPS_PROXY"
    if kinds & _SLOW:
        waits = "HF_HUB_ETAG_TIMEOUT and HF_HUB_DOWNLOAD_TIMEOUT"
        seconds = constants.HF_HUB_ETAG_TIMEOUT
        return f"{endpoint}{through} does not answer within {seconds} s: set {waits} to more seconds"
    if kinds & _CUT or "Consistency check failed" in str(error):
        return f"the connection to {endpoint}{through} broke: the same command again goes on with the download"
    if kinds & _AWAY:
        return f"the Hub does not answer at {endpoint}{through}: {first_line(chain[-1])}"
    if system := system_error(error):
        mend = "; set HF_HOME to a folder of yours" if system.errno in (errno.EACCES, errno.EPERM, errno.EROFS) else ""
        return f"{system.filename or constants.HF_HUB_CACHE} can't be used: {system.strerror}{mend}"
    if kinds & _NO_ADDRESS:
        return f"HF_ENDPOINT={endpoint} is not an address ({first_line(chain[-1])}): https://huggingface.co is one"
    if proxy and kinds & {"ValueError", "ImportError"} and "JSONDecodeError" not in kinds:
        return f"the proxy {proxy} can't be used ({first_line(chain[0])}): set HTTPS_PROXY to http://<host>:<port>"
    if isinstance(chain[0], ValueError | LookupError | TypeError | AttributeError) or "FileMetadataError" in kinds:
        mend = "log in to the network, or set HF_ENDPOINT"
        return f"what answers at {endpoint}{through} is not the Hub ({name_error(chain[0])}): {mend}"
    return first_line(chain[-1])


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _mend(status: int) -> str:
    return MENDS.get(status, "try again later")


def _status(error: BaseException) -> int | None:
    return getattr(getattr(error, "response", None), "status_code", None)


def _proxy(endpoint: str) -> str | None:
    """Host and port of the proxy for requests to `endpoint`, without its password."""
    address = urllib.parse.urlsplit(endpoint)
    if not address.hostname or urllib.request.proxy_bypass(address.hostname):
        return None
    proxies = urllib.request.getproxies()
    given = proxies.get(address.scheme) or proxies.get("all")
    if not given:
        return None
    there = urllib.parse.urlsplit(given if "//" in given else f"//{given}")
    return there.netloc.rpartition("@")[2]
