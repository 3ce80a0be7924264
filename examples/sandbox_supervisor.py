"""The supervisor of one program: sandbox.py runs this file's text by `python -c` for each program.

    trainer -- supervisor -- init -- the program, and its children

The supervisor reads its job, one line of JSON, from stdin. It starts init, in namespaces of its own
if the host allows that, and watches its memory. It kills everything when the program ends, takes
too much memory, or stdin closes (deadline, cancellation, death of the trainer). Then it writes its
report, lines of JSON, to the descriptor job["report"], and deletes the program's folder.

This file runs alone, so it imports only the standard library. The constants are named as in the
kernel: see the man pages unshare(2), mount(2), mount_setattr(2), prctl(2) and seccomp(2)."""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import struct
import sys
import time

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
NEWIPC_NEWPID_NEWNET = 0x08000000 | 0x20000000 | 0x40000000
NOSUID_NODEV = 6
RDONLY_NOSUID_NODEV = 7
NOEXEC_NOSUID_NODEV = 14
MS_BIND_REC = 0x5000
MS_REC_PRIVATE = 0x44000
MNT_DETACH = 2
MOUNT_SETATTR = 442
AT_FDCWD = -100
AT_RECURSIVE = 0x8000
PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

LIBC = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"
ROOT = os.geteuid() == 0
# User ids from 60578 to 61183 are unused (https://systemd.io/UIDS-GIDS). The number is chosen here
# because init, in a namespace of PIDs, always has PID 1.
UNUSED_UID = 60578 + os.getpid() % 600

# The parts of the host that the program may see, besides Python's own folders.
SYSTEM = """/bin /lib /lib32 /lib64 /sbin /usr /etc/ld.so.cache /etc/alternatives
            /dev/null /dev/zero /dev/random /dev/urandom"""

# The numbers of forbidden system calls on x86_64 and on aarch64: memory outside of processes,
# namespaces and mounts, looking into other processes.
FORBIDDEN = """
    memfd_create       319 279
    memfd_secret       447 447
    shmget              29 194
    msgget              68 186
    semget              64 190
    unshare            272  97
    setns              308 268
    mount              165  40
    open_tree          428 428
    move_mount         429 429
    fsopen             430 430
    mount_setattr      442 442
    ptrace             101 117
    process_vm_readv   310 270
    process_vm_writev  311 271
    pidfd_getfd        438 438
    bpf                321 280
    perf_event_open    298 241
    userfaultfd        323 282
    io_uring_setup     425 425
    add_key            248 217
    request_key        249 218
    keyctl             250 219
"""
# The only families of sockets: AF_VSOCK, for one, leads to the hypervisor.
AF_UNIX, AF_INET, AF_INET6 = 1, 2, 10
SOL_SOCKET, SO_SNDBUF = 1, 7


def check(result: int):
    """Raises OSError, as errno says, if a function of libc returned something other than 0."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def tell(descriptor: int, report: dict):
    """Writes a line of JSON."""
    os.write(descriptor, json.dumps(report).encode() + b"\n")


def prctl(option: int, value: int):
    """Sets an attribute of this process; one that the host does not know stays unset."""
    LIBC.prctl(option, value, 0, 0, 0)


# ---------------------------------------------------------------- files of its own


def enter_namespaces() -> bool:
    """Moves our children into new namespaces of PIDs, network and IPC; returns if it worked.

    Root may do that directly; others, where the host allows it, inside a new user namespace."""
    if ROOT and LIBC.unshare(NEWIPC_NEWPID_NEWNET) == 0:
        return True
    user = os.geteuid()
    group = os.getegid()
    if LIBC.unshare(CLONE_NEWUSER | NEWIPC_NEWPID_NEWNET) != 0:
        return False
    maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
    for name, text in maps.items():
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def mount(source: str | None, target: str, kind: str | None, flags: int, options=None):
    """Mounts a file system. Raises OSError."""
    texts = [text and os.fsencode(text) for text in (source, target, kind)]
    check(LIBC.mount(*texts, ctypes.c_ulong(flags), options))


def show(path: str, root: str):
    """Mounts a path of the host below `root`: read-only, unless it is a device.

    Raises OSError."""
    target = root + path
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(path):
        os.symlink(os.readlink(path), target)
        return
    if os.path.isdir(path):
        os.makedirs(target, exist_ok=True)
    else:
        open(target, "w").close()
    mount(path, target, None, MS_BIND_REC)
    if not path.startswith("/dev/"):
        attributes = struct.pack("QQQQ", RDONLY_NOSUID_NODEV, 0, 0, 0)
        check(
            LIBC.syscall(
                MOUNT_SETATTR,
                AT_FDCWD,
                os.fsencode(target),
                AT_RECURSIVE,
                attributes,
                len(attributes),
            )
        )


def take_own_root(job: dict):
    """Makes the job's folder the root of this process's files, and /sandbox its folder.

    The root is in memory. It holds Python and the system's libraries, read-only, and empty
    folders to write into. Raises OSError if the host does not allow it."""
    root = job["folder"]
    check(LIBC.unshare(CLONE_NEWNS))
    mount(None, "/", None, MS_REC_PRIVATE)
    megabytes = 4 * job["file_mb"] + len(job["code"]) // (1 << 18) + 1
    mount(
        "tmpfs", root, "tmpfs", NOSUID_NODEV, f"size={megabytes}m,nr_inodes=20000,mode=755".encode()
    )
    with open("/proc/self/maps") as maps:
        libraries = {os.path.dirname(line.split()[5]) for line in maps if "/lib" in line}
    folders = []
    for path in (*SYSTEM.split(), *job["python"], *sorted(libraries)):
        if os.path.lexists(path) and not f"{path}/".startswith(tuple(folders)):
            show(path, root)
            if not os.path.islink(path):
                folders.append(f"{path}/")
    for name in ("proc", "sandbox", "tmp", "dev/shm"):
        os.makedirs(f"{root}/{name}", exist_ok=True)
        os.chmod(f"{root}/{name}", 0o1777)
    with contextlib.suppress(OSError):  # some hosts do not allow a new /proc
        mount("proc", f"{root}/proc", "proc", NOEXEC_NOSUID_NODEV)
    os.chdir(root)
    pivot_root = 155 if X86 else 41
    check(LIBC.syscall(pivot_root, b".", b"."))
    check(LIBC.umount2(b".", MNT_DETACH))
    os.chdir("/sandbox")
    os.environ |= {"HOME": "/sandbox", "TMPDIR": "/sandbox"}


# ---------------------------------------------------------------- rights and limits


def drop_root(job: dict, own_files: bool) -> bool:
    """Takes a user id that only this run has; returns whether that worked.

    The kernel does not count root's processes (RLIMIT_NPROC). Without files of its own the
    program must be able to read Python, else root is kept."""
    needed = (sys.executable, os.__file__, job["folder"])
    readable = True
    try:
        os.setgroups([])
        os.chown(".", UNUSED_UID, UNUSED_UID)
        os.setegid(UNUSED_UID)
        os.seteuid(UNUSED_UID)
        if not own_files:
            readable = all(os.access(path, os.R_OK, effective_ids=True) for path in needed)
        os.seteuid(0)
        os.setegid(0)
        if readable:
            os.setgid(UNUSED_UID)
            os.setuid(UNUSED_UID)
        else:
            os.chown(".", 0, 0)
        return readable
    except OSError:  # a container's root may lack the right to change users
        return False


def forbid_system_calls():
    """Installs a seccomp filter: instructions (operation, jump if true, jump if false, operand).

    It forbids the FORBIDDEN system calls, clone into a user namespace, families of sockets other
    than the three above, and larger buffers of sockets."""
    if os.uname().machine not in ("x86_64", "aarch64"):
        return
    architecture = 0xC000003E if X86 else 0xC00000B7
    clone, socket, socketpair, setsockopt = (56, 41, 53, 54) if X86 else (220, 198, 199, 208)

    load = 0x20
    equal = 0x15
    any_bit = 0x45
    at_least = 0x35
    kill = (0x06, 0, 0, 0x80000000)
    allow = (0x06, 0, 0, 0x7FFF0000)
    not_permitted = (0x06, 0, 0, 0x00050000 | 1)
    not_implemented = (0x06, 0, 0, 0x00050000 | 38)
    code = [(load, 0, 0, 4), (equal, 1, 0, architecture), kill]
    code += [(load, 0, 0, 0), (at_least, 0, 1, 0x40000000), not_permitted]
    for line in FORBIDDEN.strip().splitlines():
        _, x86_number, arm_number = line.split()
        number = x86_number if X86 else arm_number
        code += [(equal, 0, 1, int(number)), not_permitted]
    code += [(equal, 0, 1, 435), not_implemented]  # clone3: glibc takes clone then
    for number in socket, socketpair:
        code += [(equal, 0, 6, number), (load, 0, 0, 16), (equal, 3, 0, AF_UNIX)]
        code += [(equal, 2, 0, AF_INET), (equal, 1, 0, AF_INET6), not_permitted, allow]
    code += [(equal, 0, 6, setsockopt), (load, 0, 0, 24), (equal, 0, 3, SOL_SOCKET)]
    code += [(load, 0, 0, 32), (equal, 0, 1, SO_SNDBUF), not_permitted, allow]
    code += [(equal, 0, 3, clone), (load, 0, 0, 16), (any_bit, 0, 1, CLONE_NEWUSER)]
    code += [not_permitted, allow]
    packed = b"".join(struct.pack("HBBI", *instruction) for instruction in code)
    buffer = ctypes.create_string_buffer(packed)
    program = struct.pack("HxxxxxxP", len(code), ctypes.addressof(buffer))
    check(LIBC.prctl(PR_SET_SECCOMP, 2, program, 0, 0))


def threads_of_user() -> int:
    """Returns how many threads our user has, in all processes."""
    count = 0
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has ended
            if os.stat(f"/proc/{pid}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{pid}/task"))
    return count


def limit(kind: int, soft: int, spare: int = 0):
    """Sets the soft limit of a resource, and the hard one `spare` higher: none above today's."""
    hard = soft + spare
    current = resource.getrlimit(kind)[1]
    if current != resource.RLIM_INFINITY:
        hard = min(hard, current)
    resource.setrlimit(kind, (min(soft, hard), hard))


# ---------------------------------------------------------------- init and the program


def isolate(job: dict, in_namespaces: bool) -> dict:
    """Gives this process files and a user of its own, as far as the host allows.

    Returns the report: whether it is isolated, and, if the job insists on that and does not get it,
    the reason as "refused"."""
    own_files = False
    reason = "namespaces are not allowed"
    if in_namespaces:
        try:
            take_own_root(job)
            own_files = True
        except OSError as error:
            reason = f"a root of its own: {error}"
    own_user = not ROOT or drop_root(job, own_files)
    report = {"isolated": own_files and own_user}
    if job["insist"] and not report["isolated"]:
        report["refused"] = reason
    return report


def set_limits(job: dict):
    """Sets the limits that init and the program share: all but the number of processes."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_CPU, job["cpu_s"], spare=1)  # SIGXCPU, and a second later SIGKILL
    limit(resource.RLIMIT_AS, job["memory_mb"] << 20)
    limit(resource.RLIMIT_FSIZE, job["file_mb"] << 20)
    limit(resource.RLIMIT_NOFILE, 256)


def fork_program(max_processes: int) -> int:
    """Forks a process that becomes the program, main.py; returns its PID.

    The limit applies to init too, so the hard one stays open until the program sets its own."""
    limit(resource.RLIMIT_NPROC, max_processes, spare=1 << 20)
    try:
        program = os.fork()
    except BlockingIOError:
        # The user's other processes count too: no user namespace, or Linux before 5.14.
        max_processes += threads_of_user()
        limit(resource.RLIMIT_NPROC, max_processes, spare=1 << 20)
        program = os.fork()
    if program == 0:
        os.setsid()
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        limit(resource.RLIMIT_NPROC, max_processes)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        forbid_system_calls()
        os.execv(sys.executable, [sys.executable, "-s", "-u", "main.py"])
    return program


def run_init(job: dict, in_namespaces: bool, to_supervisor: int):
    """Isolates this process, starts the program, waits for its end, and ends this process.

    In a namespace of PIDs the kernel kills what is left there when init ends. Writes two
    lines of JSON: the report of `isolate`; and, unless that refuses, the program's returncode
    (-N: by signal N)."""
    report = isolate(job, in_namespaces)
    # Only now: a change of user undoes both.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    prctl(PR_SET_DUMPABLE, 0)
    tell(to_supervisor, report)
    if "refused" not in report:
        with open("main.py", "wb") as file:
            file.write(job["code"].encode("utf-8", "surrogatepass"))
        set_limits(job)
        # Init counts too, and so does the supervisor where it is the same user's.
        ours = 1 if ROOT else 2
        program = fork_program(job["max_processes"] + ours)
        ended = None
        while ended != program:  # others are orphans
            ended, status = os.wait()
        tell(to_supervisor, {"returncode": os.waitstatus_to_exitcode(status)})
    os._exit(0)


# ---------------------------------------------------------------- watching, and the end


def memory(pid: int) -> int:
    """Returns the bytes that a process and its descendants have in memory.

    Shared memory counts once, if the kernel tells us how much it is. Ended processes count 0."""
    total = 0
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/statm") as file:
            total = int(file.read().split()[1]) * resource.getpagesize()
        if total > 1 << 24:  # the exact figure takes the kernel longer
            with open(f"/proc/{pid}/smaps_rollup") as file:
                sizes = [line.split()[1] for line in file if line.startswith("Pss:")]
            total = sum(int(kilobytes) << 10 for kilobytes in sizes)
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children") as file:
                children = file.read().split()
            total += sum(memory(int(child)) for child in children)
    return total


def socket_memory(buffer: int) -> int:
    """Returns the bytes that the sockets of our network namespace can hold, `buffer` each.

    The kernel keeps them until the other side reads, also of sockets that a process has
    passed on or closed."""
    with open("/proc/net/sockstat") as file:
        return int(file.readline().split()[2]) * buffer  # "sockets: used 3"


def kill_children():
    """Kills children until there are none left.

    The supervisor is a subreaper: it inherits the children of those it kills, in any session."""
    while True:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # it has ended
                with open(f"/proc/{pid}/stat", "rb") as stat:
                    parent = stat.read().rpartition(b")")[2].split()[1]
                if int(parent) == os.getpid():
                    os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.001)


def watch(init: int, from_init: int, max_memory: int, buffer: int) -> tuple[bytes, bool]:
    """Waits until the program ends, takes too much memory, or our stdin closes.

    Returns the report that init has written, and whether it was the memory, which is checked ten
    times a second. buffer: bytes per socket; 0 if others share our network namespace."""
    written = b""
    while b"returncode" not in written:
        ready, _, _ = select.select([0, from_init], [], [], 0.1)
        if from_init in ready:
            new = os.read(from_init, 1000)
            if not new:  # init has ended: it refuses, or was killed
                break
            written += new
        if 0 in ready:
            break
        if not ready and memory(init) + socket_memory(buffer) > max_memory:
            return written, True
    return written, False


def supervise():
    """Runs the job that stdin tells of, and ends this process.

    Raises ValueError if the run is cancelled before it begins: then there is no job."""
    job = json.loads(sys.stdin.buffer.readline())
    os.set_inheritable(job["report"], False)
    with open("/proc/sys/net/core/wmem_default") as file:  # not there in a new namespace
        buffer = int(file.read())
    in_namespaces = enter_namespaces()
    prctl(PR_SET_DUMPABLE, 0)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    from_init, to_supervisor = os.pipe()
    init = os.fork()
    if init == 0:
        run_init(job, in_namespaces, to_supervisor)
    os.close(to_supervisor)

    written, out_of_memory = watch(
        init, from_init, job["memory_mb"] << 20, buffer if in_namespaces else 0
    )
    os.kill(init, signal.SIGKILL)
    kill_children()
    if out_of_memory:
        message = "MemoryError: all its processes together took more than %d MB\n"
        os.write(2, message.encode() % job["memory_mb"])
    with contextlib.suppress(BrokenPipeError):  # nobody is left to read it
        os.write(job["report"], written)
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    # Unlike shutil.rmtree, rm can delete very deep trees.
    os.execvp("rm", ["rm", "-rf", job["folder"]])


if __name__ == "__main__":
    supervise()
