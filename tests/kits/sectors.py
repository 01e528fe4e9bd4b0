"""Disks that fail, for a whole process: a library, loaded before libc, whose reads of a bad sector are EIO."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char bad_file[PATH_MAX];
static long bad_byte;

/* Reads of `file` that cover `byte` fail with EIO; -1: the file cannot be opened, EACCES. An empty name ends it. */
void bad_sector(const char *file, long byte) { strncpy(bad_file, file, sizeof bad_file - 1); bad_byte = byte; }

static int fails(int handle, long at, size_t length) {
    char link[64], path[PATH_MAX];
    if (!bad_file[0] || bad_byte < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    if (strcmp(path, bad_file) || at > bad_byte || at + (long)length <= bad_byte) return 0;
    errno = EIO;
    return 1;
}

static size_t total(const struct iovec *parts, int n) { size_t s = 0; while (n--) s += parts[n].iov_len; return s; }

#define REAL(name, ret, ...) static ret (*real)(__VA_ARGS__); \
    if (!real) real = (ret (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)
ssize_t read(int h, void *b, size_t n) {
    REAL("read", ssize_t, int, void *, size_t);
    return fails(h, lseek(h, 0, SEEK_CUR), n) ? -1 : real(h, b, n);
}
#define PREAD(name) ssize_t name(int h, void *b, size_t n, off_t at) { \
    REAL(#name, ssize_t, int, void *, size_t, off_t); return fails(h, at, n) ? -1 : real(h, b, n, at); }
#define PREADV(name) ssize_t name(int h, const struct iovec *p, int n, off_t at) { \
    REAL(#name, ssize_t, int, const struct iovec *, int, off_t); \
    return fails(h, at, total(p, n)) ? -1 : real(h, p, n, at); }
#define OPEN(name) int name(const char *path, int flags, ...) { \
    va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more); \
    REAL(#name, int, const char *, int, ...); \
    if (bad_byte < 0 && bad_file[0] && !strcmp(path, bad_file)) { errno = EACCES; return -1; } \
    return real(path, flags, mode); }
PREAD(pread)
PREAD(pread64)
PREADV(preadv)
PREADV(preadv64)
ssize_t preadv64v2(int h, const struct iovec *p, int n, off_t at, int flags) {
    REAL("preadv64v2", ssize_t, int, const struct iovec *, int, off_t, int);
    return fails(h, at, total(p, n)) ? -1 : real(h, p, n, at, flags);
}
OPEN(open)
OPEN(open64)
int openat64(int from, const char *path, int flags, ...) {
    va_list more; va_start(more, flags); int mode = va_arg(more, int); va_end(more);
    REAL("openat64", int, int, const char *, int, ...);
    if (bad_byte < 0 && bad_file[0] && !strcmp(path, bad_file)) { errno = EACCES; return -1; }
    return real(from, path, flags, mode);
}
"""


def bad_disks(code: str, *words: str | Path, root: Path) -> str:
    """What `code` prints, run by Python with a function `bad_sector(path, byte)`; the test is skipped without cc.

    Reads of `path` that cover `byte` then fail with EIO; with -1 it cannot be opened (EACCES); with "" all is well.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or not sys.platform.startswith("linux"):
        pytest.skip("a C compiler on Linux is needed")
    library = root / "sectors.so"
    if not library.exists():
        (root / "sectors.c").write_text(SHIM)
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, root / "sectors.c", "-ldl"], check=True)
    head = "import ctypes\nfail = ctypes.CDLL(None).bad_sector\nfail.argtypes = [ctypes.c_char_p, ctypes.c_long]\n"
    head += "bad_sector = lambda path, byte: fail(str(path).encode(), byte)\n"
    done = subprocess.run(
        [sys.executable, "-c", head + code, *map(str, words)], env=os.environ | {"LD_PRELOAD": str(library)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
