"""One of a group's processes, as rank 0 starts it: `python -m foretoken.distributed DESCRIPTOR`."""

import sys

from foretoken.distributed.processes import follow

if __name__ == "__main__":
    sys.exit(follow(int(sys.argv[1])))
