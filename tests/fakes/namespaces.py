"""Network namespaces as hosts, and the cables between them in our hands: cut, slow, or losing packets.

Each host is a namespace with one TUN device; a thread here carries every packet from one to the other, or does not.
"""

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
CLONE_NEWNET = 0x40000000
MTU = 60000  # few, large packets: every one of them passes through Python


def forbidden():
    """Why this machine does not let us, or None."""
    try:
        with Hosts("a"):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces: {error}"


class Hosts:
    """`with Hosts("trainer", "r0") as hosts: hosts.ip["r0"]`. A process joins by `enter(hosts.space["r0"])`."""

    def __init__(self, *names):
        tag = f"dora{os.getpid()}"
        self.space = {name: f"{tag}-{name}" for name in names}
        self.ip = {name: f"10.77.{os.getpid() % 250}.{number}" for number, name in enumerate(names, 1)}
        self._links = {}  # pair of names -> (share of packets lost, delay_s)
        self._ends = {}
        self._late = []
        self._draw = random.Random(0)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._carry, daemon=True)
        self.carried = 0

    def __enter__(self):
        try:
            for number, name in enumerate(self.space):
                self._open(name, f"dora{number}p{os.getpid() % 10000}")
        except BaseException:
            self._close()
            raise
        self._thread.start()
        return self

    def __exit__(self, *failure):
        self._over.set()
        self._thread.join()
        self._close()

    def link(self, a, b, lost=0.0, delay_s=0.0):
        self._links[frozenset((a, b))] = lost, delay_s

    def cut(self, a, b):
        self.link(a, b, lost=1.0)

    # ------------------------------------------------------------ private

    def _open(self, name, device):
        ip("netns", "add", self.space[name])
        fd = self._ends[name] = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH", device.encode(), IFF_TUN | IFF_NO_PI))
        ip("link", "set", device, "netns", self.space[name])
        ip("-n", self.space[name], "addr", "add", f"{self.ip[name]}/24", "dev", device)
        ip("-n", self.space[name], "link", "set", device, "mtu", str(MTU), "up")
        ip("-n", self.space[name], "link", "set", "lo", "up")

    def _close(self):
        for fd in self._ends.values():
            os.close(fd)
        for space in self.space.values():
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)

    def _carry(self):
        names = {bytes(map(int, address.split("."))): name for name, address in self.ip.items()}
        sources = {fd: name for name, fd in self._ends.items()}
        while not self._over.is_set():
            wait_s = max(0.0, self._late[0][0] - time.monotonic()) if self._late else 0.05
            ready, _, _ = select.select(list(sources), [], [], min(wait_s, 0.05))
            while self._late and self._late[0][0] <= time.monotonic():
                _, _, packet, name = heapq.heappop(self._late)
                self._put(packet, name)
            for fd in ready:
                packet = os.read(fd, MTU + 64)
                target = names.get(packet[16:20])
                if packet[0] >> 4 != 4 or target is None:
                    continue  # not IPv4, or to nobody
                lost, delay_s = self._links.get(frozenset((sources[fd], target)), (0.0, 0.0))
                self.carried += 1
                if self._draw.random() >= lost:
                    heapq.heappush(self._late, (time.monotonic() + delay_s, self.carried, packet, target))

    def _put(self, packet, name):
        try:
            os.write(self._ends[name], packet)
        except BlockingIOError:
            pass  # its queue is full: networks drop


def enter(space):
    """This process is in that namespace from now on."""
    with open(f"/run/netns/{space}") as handle:
        if ctypes.CDLL(None, use_errno=True).setns(handle.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {space}")


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
