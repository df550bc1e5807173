"""The system calls that judged code may not make: a seccomp filter, the same at every level of the sandbox.

A kernel under test computes; it needs no socket, no name space and no other process's memory. Refused calls fail with
EPERM, so that a library that tries one goes on without it. CUDA fails as it starts where it may not make memory files,
or a Unix socket with which it looks for a daemon (error 304, seen with driver 580 on Linux 6.18). Where a GPU is used,
memory files, shared mappings and Unix sockets that must be connected stay, and no socket finds anyone to connect to.
Standard library only.
"""

from __future__ import annotations

import ctypes
import errno
import platform
import struct
from collections.abc import Iterator
from typing import Final

# name: number on x86_64 (asm/unistd_64.h), on aarch64 (asm-generic/unistd.h)
REFUSED: Final[dict[str, tuple[int, int | None]]] = {
    "io_uring_setup": (425, 425),  # makes sockets past this filter
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # Memory that stays when no process maps it, which nobody could count.
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    # Other processes, their memory and their files.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "userfaultfd": (323, 282),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Name spaces and mounts: a new user name space would give capabilities back.
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "mount_setattr": (442, 442),
    "move_mount": (429, 429),
    "open_tree": (428, 428),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_by_handle_at": (304, 265),
    # The kernel itself.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "syslog": (103, 116),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "quotactl": (179, 60),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "iopl": (172, None),
    "ioperm": (173, None),
}
_CLONE, _CLONE3, _MMAP, _PRCTL = (56, 220), (435, 435), (9, 222), (157, 167)
_SOCKET, _CONNECT = (41, 198), (42, 203)
_NEW_USER, _SHARED_ANONYMOUS, _HUGETLB, _SET_DUMPABLE = 0x10000000, 0x21, 0x40000, 4
# Refused where no GPU is used. The network, Unix sockets, AF_VSOCK, AF_NETLINK, AF_PACKET, AF_ALG: no family has a use;
# socketpair stays.
WITHOUT_GPU: Final[dict[str, tuple[int, int | None]]] = {"memfd_create": (319, 279), "socket": _SOCKET}
# Refused by an argument: number, index of the argument, mask, value of its low 32 bits under the mask.
_SHARED_MAPPINGS: Final = ((_MMAP, 3, _SHARED_ANONYMOUS, _SHARED_ANONYMOUS),)  # stay while one page of them is mapped
_BY_ARGUMENT: Final = (
    (_CLONE, 0, _NEW_USER, _NEW_USER),
    (_MMAP, 3, _HUGETLB, _HUGETLB),  # in no resident size
    (_PRCTL, 0, 0xFFFFFFFF, _SET_DUMPABLE),  # hides memory from who counts it
)
# With a GPU: a socket of a family that is not 1, AF_UNIX; and of a type that reaches others without being connected.
_BUT_UNIX_SOCKETS: Final = (
    (_SOCKET, 0, 1, 0),
    *((_SOCKET, 0, bit, bit) for bit in (2, 4, 8, 16, 32, 64, 128)),
    (_SOCKET, 1, 2, 2),  # SOCK_DGRAM, SOCK_RAW; SOCK_STREAM is 1, SOCK_SEQPACKET 5
)
_ARCHITECTURES: Final = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # column; linux/audit.h
_X32: Final = 0x40000000  # calls of the x32 interface, from this number
# linux/bpf_common.h, linux/seccomp.h
_LOAD, _AND, EQUAL, _AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data; little-endian: the low half comes first
_PR_SET_SECCOMP, _MODE_FILTER = 22, 2
Instruction = tuple[int, int, int, int]  # code, instructions to skip if true, if false, operand


def install(*, gpu: bool) -> bool:
    """Refuse these calls to this process and its children from now on; False where the kernel has no such filter."""
    if platform.machine() not in _ARCHITECTURES:
        return False
    code = b"".join(struct.pack("=HBBI", *x) for x in program(platform.machine(), gpu=gpu))
    buffer = ctypes.create_string_buffer(code, len(code))
    filter_ = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))  # struct sock_fprog
    return bool(ctypes.CDLL(None).prctl(_PR_SET_SECCOMP, _MODE_FILTER, filter_, 0, 0) == 0)


def program(machine: str, *, gpu: bool) -> list[Instruction]:
    """The filter as BPF: what is not refused is allowed; another machine's calls end the process."""
    column, audit = _ARCHITECTURES[machine]
    return [
        (_LOAD, 0, 0, _ARCH_AT),
        (EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *([(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)] if machine == "x86_64" else []),
        *_refusals(column, gpu=gpu),
        (_RETURN, 0, 0, _ALLOW),
    ]


def _refusals(column: int, *, gpu: bool) -> Iterator[Instruction]:
    # clone3 has its flags in memory, where no filter sees them: without it the C library takes clone.
    refused = REFUSED | ({} if gpu else WITHOUT_GPU)
    numbers = [
        (_CLONE3[column], errno.ENOSYS),
        *([(_CONNECT[column], errno.ECONNREFUSED)] if gpu else []),  # as where nobody listens: CUDA goes on alone
        *((found[column], errno.EPERM) for found in refused.values()),
    ]
    for number, code in numbers:
        if number is not None:
            yield EQUAL, 0, 1, number
            yield _RETURN, 0, 0, _ERRNO | code
    for call, index, mask, value in _BY_ARGUMENT + (_BUT_UNIX_SOCKETS if gpu else _SHARED_MAPPINGS):
        yield EQUAL, 0, 5, call[column]
        yield _LOAD, 0, 0, _ARGUMENTS_AT + 8 * index
        yield _AND, 0, 0, mask
        yield EQUAL, 0, 1, value
        yield _RETURN, 0, 0, _ERRNO | errno.EPERM
        yield _LOAD, 0, 0, _NUMBER_AT
