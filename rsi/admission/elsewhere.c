/* Another machine, for the determinism gate: preloaded into a sandbox, it moves the clock and renames the host.
 *
 * A process cannot get a wall clock of its own from the kernel (time namespaces move the monotonic clocks only), and a
 * `date` earlier on PATH would not reach Python. Files written since the start move along with the clock, so that what
 * is compared with "now" stays as fresh as it is; what the image holds keeps its date, as it would in life.
 * Linked against no libc, so that it loads whatever the image has. ELSEWHERE_SHIFT is in seconds, ELSEWHERE_SINCE is when
 * the sandbox began, ELSEWHERE_HOST a name. Static programs are out of its reach.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

static long number(const char *name) {
    const char *text = getenv(name);
    return text ? atol(text) : 0;
}

static long shift(void) { return number("ELSEWHERE_SHIFT"); }

/* ---- the clock */

int clock_gettime(clockid_t id, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, id, now);
    if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI)) now->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (out) *out = exact.tv_sec;
    return exact.tv_sec;
}

/* ---- file times: stored unshifted, seen shifted, if they are of this run */

static void move(struct timespec *seen) {
    if (seen->tv_sec >= number("ELSEWHERE_SINCE")) seen->tv_sec += shift();
}

static int moved(int failed, struct stat *seen) {
    if (!failed) move(&seen->st_atim), move(&seen->st_mtim), move(&seen->st_ctim);
    return failed;
}

int fstatat(int folder, const char *path, struct stat *seen, int flags) {
    return moved(syscall(SYS_newfstatat, folder, path, seen, flags), seen);
}
int stat(const char *path, struct stat *seen) { return fstatat(AT_FDCWD, path, seen, 0); }
int lstat(const char *path, struct stat *seen) { return fstatat(AT_FDCWD, path, seen, AT_SYMLINK_NOFOLLOW); }
int fstat(int fd, struct stat *seen) { return moved(syscall(SYS_fstat, fd, seen), seen); }

int fstatat64(int folder, const char *restrict path, struct stat64 *restrict seen, int flags) {
    return fstatat(folder, path, (struct stat *)seen, flags);
}
int stat64(const char *restrict path, struct stat64 *restrict seen) { return stat(path, (struct stat *)seen); }
int lstat64(const char *restrict path, struct stat64 *restrict seen) { return lstat(path, (struct stat *)seen); }
int fstat64(int fd, struct stat64 *seen) { return fstat(fd, (struct stat *)seen); }

int statx(int folder, const char *restrict path, int flags, unsigned mask, struct statx *restrict seen) {
    int failed = syscall(SYS_statx, folder, path, flags, mask, seen);
    long since = number("ELSEWHERE_SINCE");
    struct statx_timestamp *times[] = {&seen->stx_atime, &seen->stx_mtime, &seen->stx_ctime, &seen->stx_btime};
    for (int i = 0; !failed && i < 4; i++)
        if (times[i]->tv_sec >= since) times[i]->tv_sec += shift();
    return failed;
}

/* A time that a program sets itself (touch, tar, cp -p) is one that it will read again. */
static int set_times(int folder, const char *path, const struct timespec times[2], int flags) {
    struct timespec stored[2];
    if (times) {
        memcpy(stored, times, sizeof stored);
        for (int i = 0; i < 2; i++)
            if (stored[i].tv_nsec < UTIME_OMIT && stored[i].tv_sec >= number("ELSEWHERE_SINCE") + shift())
                stored[i].tv_sec -= shift();
    }
    return syscall(SYS_utimensat, folder, path, times ? stored : NULL, flags);
}
int utimensat(int folder, const char *path, const struct timespec times[2], int flags) {
    return set_times(folder, path, times, flags);
}
int futimens(int fd, const struct timespec times[2]) { return set_times(fd, NULL, times, 0); }

/* ---- the name */

static const char *host(void) {
    const char *name = getenv("ELSEWHERE_HOST");
    return name ? name : "sandbox";
}

int gethostname(char *out, size_t size) {
    size_t length = strlen(host());
    if (length >= size) return errno = ENAMETOOLONG, -1;
    memcpy(out, host(), length + 1);
    return 0;
}

int uname(struct utsname *out) {
    int failed = syscall(SYS_uname, out);
    if (!failed) strncpy(out->nodename, host(), sizeof out->nodename - 1);
    return failed;
}
