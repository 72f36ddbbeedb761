"""The system calls that a program in the sandbox may not make, as a seccomp filter for `bwrap --seccomp`.

Consumes the name of the machine (x86_64, aarch64); produces a compiled BPF program: struct sock_filter after struct
sock_filter, run by the kernel at each call on struct seccomp_data {nr, arch, instruction pointer, args[6]}.
Laws: a call of another architecture kills the process; a denied call returns EPERM; clone3, whose flags a filter cannot
read, and every call newer than NEWEST return ENOSYS, so that the C library takes the older one. Source: seccomp(2).
"""

from __future__ import annotations

import errno
import struct

X86_64, AARCH64 = "x86_64", "aarch64"
AUDIT_ARCH = {X86_64: 0xC000003E, AARCH64: 0xC00000B7}
NEWEST = 451  # the numbers from 424 on are the same on every architecture
DENIED = {  # name: (number on x86_64, on aarch64); None: the architecture has no such call
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    # mounts, namespaces, files by handle
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    # parts of the kernel with a history of escapes
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "bpf": (321, 280),
    "userfaultfd": (323, 282), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "personality": (135, 92),
    "modify_ldt": (154, None), "uselib": (134, None), "iopl": (172, None), "ioperm": (173, None),
    # memory that no limit of a process counts
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "semget": (64, 190),
    "msgget": (68, 186), "mq_open": (240, 180),
    # the machine
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104),
    "kexec_file_load": (320, 294), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "clock_adjtime": (305, 266), "sethostname": (170, 161),
    "setdomainname": (171, 162), "syslog": (103, 116), "vhangup": (153, 58),
}  # fmt: skip
# Calls whose arguments decide.
CLONE, CLONE3, SOCKET, IOCTL, SETSOCKOPT = (56, 220), (435, 435), (41, 198), (16, 29), (54, 208)
BUFFER_SIZES = (7, 8, 32, 33)  # SO_SNDBUF, SO_RCVBUF and the two that force them: memory that no limit counts
NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
AF_UNIX = 1
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # put characters into a terminal's input

LOAD, JUMP_EQUAL, JUMP_NOT_BELOW, JUMP_ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
NR_AT, ARCH_AT, ARG0_AT, ARG1_AT, ARG2_AT = 0, 4, 16, 24, 32  # offsets in seccomp_data; of an argument, its lower half

Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, if false, operand


def compiled(machine: str) -> bytes:
    """The filter for `machine` (platform.machine()); KeyError for an architecture that the tables do not have."""
    arch, column = AUDIT_ARCH[machine], (X86_64, AARCH64).index(machine)
    denied, unknown = _return(ERRNO | errno.EPERM), _return(ERRNO | errno.ENOSYS)
    body = [(LOAD, 0, 0, ARCH_AT), (JUMP_EQUAL, 1, 0, arch), _return(KILL), (LOAD, 0, 0, NR_AT)]
    body += _if(JUMP_NOT_BELOW, NEWEST + 1, [unknown]) + _if(JUMP_EQUAL, CLONE3[column], [unknown])
    for number in (numbers[column] for numbers in DENIED.values()):
        if number is not None:
            body += _if(JUMP_EQUAL, number, [denied])
    flags = [(LOAD, 0, 0, ARG0_AT), *_if(JUMP_ANY_BIT, NAMESPACE_FLAGS, [denied]), _return(ALLOW)]
    family = [(LOAD, 0, 0, ARG0_AT), *_if(JUMP_EQUAL, AF_UNIX, [_return(ALLOW)]), denied]
    typed = [*_if(JUMP_EQUAL, TIOCSTI, [denied]), *_if(JUMP_EQUAL, TIOCLINUX, [denied])]
    body += _if(JUMP_EQUAL, CLONE[column], flags) + _if(JUMP_EQUAL, SOCKET[column], family)
    body += _if(JUMP_EQUAL, IOCTL[column], [(LOAD, 0, 0, ARG1_AT), *typed, _return(ALLOW)])
    sized = [each for option in BUFFER_SIZES for each in _if(JUMP_EQUAL, option, [denied])]
    body += _if(JUMP_EQUAL, SETSOCKOPT[column], [(LOAD, 0, 0, ARG2_AT), *sized, _return(ALLOW)])
    return b"".join(struct.pack("<HBBI", *instruction) for instruction in [*body, _return(ALLOW)])


def _if(test: int, operand: int, then: list[Instruction]) -> list[Instruction]:
    return [(test, 0, len(then), operand), *then]


def _return(action: int) -> Instruction:
    return (RETURN, 0, 0, action)
