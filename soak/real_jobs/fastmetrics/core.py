"""Sends values somewhere, slowly."""

import time


class Client:
    def flush(self):
        time.sleep(0.04)


def push(values, client=Client()):
    client.flush()
