"""A server that sends back what it is sent: what a client that is connected to its own port sees."""

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class _Echo(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        with suppress(ConnectionError):  # the client may have gone
            for line in self.rfile:
                self.wfile.write(line)
                if line == b"\r\n":
                    return


@contextmanager
def echo_server() -> Iterator[int]:
    """The port on loopback."""
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Echo) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
