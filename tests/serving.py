"""A folder of pages, served as a web server would, for the tests in a browser."""

import contextlib
import functools
import http.server
import threading


class _Quiet(http.server.SimpleHTTPRequestHandler):

    def log_message(self, *arguments):
        pass


@contextlib.contextmanager
def served(folder):
    """Serve the folder on this machine; yields its address."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0),
                                             functools.partial(_Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
