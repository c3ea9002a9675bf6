"""Stand-in for a Python interpreter: `python -IS fork_client.py SOCKET PYTHON ARGUMENTS...`.

It sends `-m MODULE ...` to the server of flows/execution/fork_server.py and ends with the module's
exit code. Other arguments, and a server that is gone, run PYTHON itself. It imports little, so that
it starts fast.
"""

import json
import os
import signal
import socket
import sys


def main() -> int:
    address, python, *arguments = sys.argv[1:]
    connection = socket.socket(socket.AF_UNIX)
    try:
        if arguments[:1] != ["-m"]:
            raise ConnectionError
        connection.connect(address)
        request = json.dumps(
            {"arguments": arguments[1:], "folder": os.getcwd(), "environment": dict(os.environ)}
        ).encode()
        socket.send_fds(connection, [len(request).to_bytes(4)], [0, 1, 2])
        connection.sendall(request)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: connection.send(bytes([number])))
        if not connection.recv(1):  # the server ended before it accepted the request
            raise ConnectionError
    except ConnectionError:
        os.execv(python, [python, *arguments])
    code = connection.recv(1)
    # Without a code the server was killed, and the module with it.
    return code[0] if code else 128 + signal.SIGKILL


if __name__ == "__main__":
    sys.exit(main())
