"""The seccomp filter, run by a small BPF interpreter: what each architecture's calls get, by name and by argument."""

import errno
import re
import struct
from pathlib import Path

import pytest

from dora_jax.tasks.sandbox import seccomp

HEADERS = {
    seccomp.X86_64: [Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")],
    seccomp.AARCH64: [Path("/usr/include/asm-generic/unistd.h")],
}
machines = pytest.mark.parametrize("machine", seccomp.AUDIT_ARCH)
DENIED, MISSING = seccomp.ERRNO | errno.EPERM, seccomp.ERRNO | errno.ENOSYS


def decided(machine, number, *arguments, arch=None):
    """What the compiled filter returns for a call, as the kernel runs it."""
    data = struct.pack(
        "<IIQ6Q",
        number,
        seccomp.AUDIT_ARCH[machine] if arch is None else arch,
        0,
        *arguments,
        *[0] * (6 - len(arguments)),
    )
    program = list(struct.iter_unpack("<HBBI", seccomp.compiled(machine)))
    at = value = 0
    while True:
        code, yes, no, operand = program[at]
        at += 1
        if code == seccomp.LOAD:
            (value,) = struct.unpack_from("<I", data, operand)
        elif code == seccomp.RETURN:
            return operand
        else:
            holds = {
                seccomp.JUMP_EQUAL: value == operand,
                seccomp.JUMP_NOT_BELOW: value >= operand,
                seccomp.JUMP_ANY_BIT: bool(value & operand),
            }[code]
            at += yes if holds else no


def number(machine, numbers):
    return numbers[list(seccomp.AUDIT_ARCH).index(machine)]


@machines
def test_every_denied_call_is_denied_and_its_neighbours_are_not(machine):
    numbers = {number(machine, pair) for pair in seccomp.DENIED.values()} - {None}
    by_argument = {number(machine, pair) for pair in (seccomp.CLONE, seccomp.SOCKET, seccomp.IOCTL, seccomp.CLONE3)}
    by_argument.add(number(machine, seccomp.SETSOCKOPT))
    for call in range(seccomp.NEWEST + 1):
        if call not in by_argument:
            assert decided(machine, call) == (DENIED if call in numbers else seccomp.ALLOW), call


@machines
def test_arguments_decide_about_namespaces_sockets_and_terminals(machine):
    clone, socket, ioctl = (number(machine, pair) for pair in (seccomp.CLONE, seccomp.SOCKET, seccomp.IOCTL))
    assert decided(machine, clone, 0x003D0F00) == seccomp.ALLOW  # a thread
    assert decided(machine, clone, 17) == seccomp.ALLOW  # fork
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert decided(machine, clone, flag | 17) == DENIED
    assert [decided(machine, socket, family) for family in (1, 2, 10, 16, 38, 40)] == [seccomp.ALLOW, *[DENIED] * 5]
    assert [decided(machine, ioctl, 0, request) for request in (0x5401, 0x5412, 0x541C)] == [
        seccomp.ALLOW,
        DENIED,
        DENIED,
    ]
    sizes = [decided(machine, number(machine, seccomp.SETSOCKOPT), 3, 1, option) for option in (2, 7, 8, 9, 32, 33)]
    assert sizes == [seccomp.ALLOW, DENIED, DENIED, seccomp.ALLOW, DENIED, DENIED]
    assert decided(machine, ioctl, 0, 1 << 32 | 0x5412) == DENIED  # the kernel reads the lower half alone


@machines
def test_unknown_calls_are_missing_and_another_architecture_is_the_end(machine):
    for call in (435, 452, 600, 0x40000000 | 101, 2**32 - 1):
        assert decided(machine, call) == MISSING
    assert decided(machine, 1, arch=0x40000003) == seccomp.KILL  # i386 on x86_64


@machines
def test_the_numbers_are_those_of_the_kernel_s_headers(machine):
    (path,) = HEADERS[machine]
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    lines = re.finditer(r"#define __NR(?:3264)?_(?:3264_)?(\w+)\s+(\d+)", path.read_text())
    known = {match[1]: int(match[2]) for match in lines}
    by_argument = {"clone": seccomp.CLONE, "clone3": seccomp.CLONE3, "socket": seccomp.SOCKET, "ioctl": seccomp.IOCTL}
    by_argument["setsockopt"] = seccomp.SETSOCKOPT
    for name, numbers in {**seccomp.DENIED, **by_argument}.items():
        if name in known or number(machine, numbers) is None:
            assert number(machine, numbers) == known.get(name), name


def test_a_filter_for_another_architecture_is_not_made_up():
    with pytest.raises(KeyError):
        seccomp.compiled("riscv64")
