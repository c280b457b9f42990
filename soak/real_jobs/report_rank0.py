"""Rank 0 sends its loss to a server that takes 25 ms to answer, in every step."""

import http.server
import json
import threading
import time
import urllib.request

from small import batch, ended, started


class Slow(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        time.sleep(0.025)
        self.send_response(204)
        self.end_headers()

    def log_message(self, *words):
        pass


def send_metrics(address, step, loss):
    data = json.dumps({"step": step, "loss": float(loss)}).encode()
    urllib.request.urlopen(urllib.request.Request(address, data=data), timeout=10).close()


def main():
    rank, model, optimizer = started()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Slow)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_address[1]}"
    for step in range(80):
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            send_metrics(address, step, loss)
    ended()


main()
