"""Replies of a language model's server that have a limit of bytes and of time, errors included."""

from collections.abc import Iterator

import httpx2  # of the package openai

from stages.lib.core.http_session import EndlessReply, limited_chunks

# A compressed reply could unpack to any size
UNCOMPRESSED = {"Accept-Encoding": "identity"}


class LimitedTransport(httpx2.HTTPTransport):
    """Raises httpx2.ReadError for a reply that is too large, too slow, or compressed.

    Args:
        seconds: from the head of a reply to its end; httpx's own timeout is for each piece.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        response = super().handle_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            response.close()
            raise httpx2.ReadError("the reply is compressed, which the request excludes")
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Limited(response.stream, self.seconds)
        return response


class _Limited(httpx2.SyncByteStream):
    def __init__(self, stream: httpx2.SyncByteStream, seconds: float) -> None:
        self.stream, self.seconds = stream, seconds

    def __iter__(self) -> Iterator[bytes]:
        try:
            yield from limited_chunks(self.stream, self.seconds)
        except EndlessReply as error:
            raise httpx2.ReadError(str(error)) from None

    def close(self) -> None:
        self.stream.close()
