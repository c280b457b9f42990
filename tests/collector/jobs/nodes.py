"""Start N launchers of one job beside each other, as N nodes would: ``nodes.py N WORD...``.

``{node}`` and ``{port}`` in a word are replaced by the number of the node, and by a port that was free.
Ends with the first exit code that is not 0, after all have ended.
"""

import socket
import subprocess
import sys


def main() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    launchers = [
        subprocess.Popen([word.format(node=node, port=port) for word in sys.argv[2:]])
        for node in range(int(sys.argv[1]))
    ]
    codes = [launcher.wait() for launcher in launchers]
    return next((code if code > 0 else 128 - code for code in codes if code), 0)


sys.exit(main())
