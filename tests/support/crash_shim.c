// LD_PRELOAD: writes down what a process does to files below CRASH_ROOT, and makes calls fail. For tests.support.crash.
//
// CRASH_JOURNAL names the file to write it to: records of `<op:u8><path:u16><other:u16><length:u32><offset:u64>`, then
// both paths and the data. CRASH_STORM=SEED:PER_MILLE:SKIPPED lets that share of calls fail, after the first SKIPPED: writes
// with ENOSPC or EIO or cut short, syncs and allocations with EIO or ENOSPC, reads with EIO. crash_arm() does so from inside,
// by number: the first-th call from now on and every so many after it. CRASH_CLOCK=SEED lets the clock of the day jump by
// up to ten years at each look.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum Op { CREATE = 'c', WRITE = 'w', SYNCED_WRITE = 'W', SIZE = 's', EXTEND = 'e', SYNC = 'f', RENAME = 'r', UNLINK = 'u', MKDIR = 'd' };

static pthread_mutex_t turn = PTHREAD_MUTEX_INITIALIZER;
static const char *root, *journal_path;
static int journal = -1;
static uint64_t chance, clock_chance;
static unsigned per_mille, skipped;

// What a call does instead of its work; a torn write writes some sectors and is the process's last.
enum Fault { NONE, NO_SPACE, BAD, SHORT, TORN };
static enum Fault armed;
static long calls_left, every, struck;

#define REAL(name, type, ...) static type (*real)(__VA_ARGS__); if (!real) *(void **)&real = dlsym(RTLD_NEXT, name)

__attribute__((constructor)) static void begin(void) {
  root = getenv("CRASH_ROOT");
  journal_path = getenv("CRASH_JOURNAL");
  if (journal_path) journal = open(journal_path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const char *clock_seed = getenv("CRASH_CLOCK");
  if (clock_seed) clock_chance = strtoul(clock_seed, 0, 10) * 2654435761u + 1;
  const char *storm = getenv("CRASH_STORM");
  if (storm) { unsigned long seed = 0; sscanf(storm, "%lu:%u:%u", &seed, &per_mille, &skipped); chance = seed * 2654435761u + 1; }
}

static int below(const char *path) {
  return root && path && !strncmp(path, root, strlen(root)) && !strstr(path, "lock.mdb");
}

static int path_of(int fd, char *path) {
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = root ? readlink(link, path, 4095) : -1;
  if (length <= 0) return 0;
  path[length] = 0;
  return below(path);
}

static void put(enum Op op, const char *path, const char *other, uint64_t offset, const struct iovec *data, int parts, size_t length) {
  if (journal < 0) return;
  REAL("write", ssize_t, int, const void *, size_t);
  uint16_t path_size = strlen(path), other_size = strlen(other);
  uint32_t size = length;
  size_t total = 17 + path_size + other_size + length, at = 17;
  char *record = malloc(total);
  record[0] = op;
  memcpy(record + 1, &path_size, 2); memcpy(record + 3, &other_size, 2); memcpy(record + 5, &size, 4); memcpy(record + 9, &offset, 8);
  memcpy(record + at, path, path_size); at += path_size;
  memcpy(record + at, other, other_size); at += other_size;
  for (int part = 0; part < parts && at < total; part++) {
    size_t some = data[part].iov_len < total - at ? data[part].iov_len : total - at;
    memcpy(record + at, data[part].iov_base, some); at += some;
  }
  if (real(journal, record, total) != (ssize_t)total) abort();
  free(record);
}

static unsigned throw_dice(uint64_t *state) {  // xorshift
  *state ^= *state << 13; *state ^= *state >> 7; *state ^= *state << 17;
  return (unsigned)(*state >> 20);
}

void crash_arm(int fault, long first, long period) {
  pthread_mutex_lock(&turn);
  armed = fault; calls_left = first; every = period; struck = 0;
  pthread_mutex_unlock(&turn);
}
long crash_struck(void) { return struck; }

static int is_faulty(void) { return per_mille || armed; }

// The caller has the turn.
static enum Fault next_fault(void) {
  if (armed && calls_left && !--calls_left) { calls_left = every; struck++; return armed; }
  if (skipped) return skipped--, NONE;
  if (!per_mille || throw_dice(&chance) % 1000 >= per_mille) return NONE;
  return (enum Fault[]){BAD, NO_SPACE, SHORT}[throw_dice(&chance) % 3];
}

// Whether a call that is done or not fails now; by a storm only those that the caller names.
static int fails(int in_storms, int *error) {
  if (!(in_storms || armed)) return 0;
  enum Fault fault = next_fault();
  if (fault == TORN) raise(SIGKILL);
  *error = fault == NO_SPACE ? ENOSPC : EIO;
  return fault != NONE;
}

// Half of the last part, in whole sectors, and nothing of those before it.
static void tear(int fd, const struct iovec *parts, int count, off_t offset) {
  REAL("pwrite", ssize_t, int, const void *, size_t, off_t);
  for (int part = 0; part < count - 1; part++) offset += parts[part].iov_len;
  real(fd, parts[count - 1].iov_base, parts[count - 1].iov_len / 1024 * 512, offset);
  raise(SIGKILL);
}

static ssize_t write_parts(int fd, const struct iovec *parts, int count, off_t offset) {
  REAL("pwritev", ssize_t, int, const struct iovec *, int, off_t);
  char path[4096];
  if (!path_of(fd, path) || strstr(path, "/ack")) return real(fd, parts, count, offset);
  pthread_mutex_lock(&turn);
  ssize_t done = -1;
  switch (next_fault()) {
    case NONE: done = real(fd, parts, count, offset); break;
    case NO_SPACE: done = -1; errno = ENOSPC; break;
    case SHORT: if (count > 1 || parts[0].iov_len > 4096) { done = real(fd, &(struct iovec){parts[0].iov_base, 4096}, 1, offset); break; }  // fall through
    case BAD: done = -1; errno = EIO; break;
    case TORN: tear(fd, parts, count, offset);
  }
  int error = errno;
  if (done > 0) put(fcntl(fd, F_GETFL) & O_DSYNC ? SYNCED_WRITE : WRITE, path, "", offset, parts, count, done);
  pthread_mutex_unlock(&turn);
  errno = error;
  return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return write_parts(fd, parts, count, offset); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off_t offset) { return write_parts(fd, parts, count, offset); }
// what Python calls
ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags) { return write_parts(fd, parts, count, offset); }
ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) { return write_parts(fd, parts, count, offset); }
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { struct iovec part = {(void *)data, size}; return write_parts(fd, &part, 1, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off_t offset) { return pwrite(fd, data, size, offset); }

// LMDB seeks, then writes pages that lie beside each other by one call.
ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL("writev", ssize_t, int, const struct iovec *, int);
  char path[4096];
  if (!path_of(fd, path)) return real(fd, parts, count);
  off_t offset = lseek(fd, 0, fcntl(fd, F_GETFL) & O_APPEND ? SEEK_END : SEEK_CUR);
  ssize_t done = write_parts(fd, parts, count, offset);
  int error = errno;
  if (done > 0) lseek(fd, offset + done, SEEK_SET);
  errno = error;
  return done;
}

ssize_t write(int fd, const void *data, size_t size) {
  REAL("write", ssize_t, int, const void *, size_t);
  char path[4096];
  if (fd < 3 || fd == journal || !path_of(fd, path)) return real(fd, data, size);
  pthread_mutex_lock(&turn);
  off_t offset = lseek(fd, 0, SEEK_CUR);
  ssize_t done = real(fd, data, size);
  struct iovec part = {(void *)data, size};
  if (done > 0) put(WRITE, path, "", offset, &part, 1, done);
  pthread_mutex_unlock(&turn);
  return done;
}

static ssize_t read_parts(int fd, const struct iovec *parts, int count, off_t offset) {
  REAL("preadv", ssize_t, int, const struct iovec *, int, off_t);
  char path[4096];
  // segments, and what LMDB reads without its map: its state
  if (is_faulty() && path_of(fd, path) && (strstr(path, ".seg") || (armed && strstr(path, ".mdb")))) {
    pthread_mutex_lock(&turn);
    enum Fault fault = next_fault();
    pthread_mutex_unlock(&turn);
    if (fault == SHORT && parts[0].iov_len > 4096 && armed) return real(fd, &(struct iovec){parts[0].iov_base, 4096}, 1, offset);
    if (fault == TORN) raise(SIGKILL);
    if (fault) { errno = EIO; return -1; }
  }
  return real(fd, parts, count, offset);
}
ssize_t preadv(int fd, const struct iovec *parts, int count, off_t offset) { return read_parts(fd, parts, count, offset); }
ssize_t preadv64(int fd, const struct iovec *parts, int count, off_t offset) { return read_parts(fd, parts, count, offset); }
ssize_t preadv2(int fd, const struct iovec *parts, int count, off_t offset, int flags) { return read_parts(fd, parts, count, offset); }
ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off_t offset, int flags) { return read_parts(fd, parts, count, offset); }
ssize_t pread(int fd, void *data, size_t size, off_t offset) { return read_parts(fd, &(struct iovec){data, size}, 1, offset); }
ssize_t pread64(int fd, void *data, size_t size, off_t offset) { return pread(fd, data, size, offset); }

static int sync_file(int fd, int (*real)(int)) {
  char path[4096];
  if (!path_of(fd, path)) return real(fd);
  pthread_mutex_lock(&turn);
  int done = 0;
  int error = 0;
  if (fails(1, &error)) { done = -1; errno = EIO; } else done = real(fd);
  error = errno;
  if (!done) put(SYNC, path, "", 0, 0, 0, 0);
  pthread_mutex_unlock(&turn);
  errno = error;
  return done;
}
int fsync(int fd) { REAL("fsync", int, int); return sync_file(fd, real); }
int fdatasync(int fd) { REAL("fdatasync", int, int); return sync_file(fd, real); }

// The whole name of a file in an open folder, as shutil.rmtree() names them.
static const char *in_folder(int folder, const char *name, char *path) {
  if (folder == AT_FDCWD || name[0] == '/') return name;
  char link[64], place[2048];
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  ssize_t length = root ? readlink(link, place, sizeof place - 1) : -1;
  if (length <= 0) return name;
  place[length] = 0;
  snprintf(path, 4096, "%s/%s", place, name);
  return path;
}

static int changed(enum Op op, const char *path, const char *other, uint64_t offset, int done) {
  int error = errno;
  if (done >= 0 && below(path)) put(op, path, other, offset, 0, 0, 0);
  errno = error;
  return done;
}

static int open_path(int folder, const char *name, int flags, mode_t mode) {
  REAL("openat", int, int, const char *, int, ...);
  char whole[4096];
  if (!(flags & O_CREAT)) return real(folder, name, flags, mode);
  const char *path = in_folder(folder, name, whole);
  if (!below(path)) return real(folder, name, flags, mode);
  pthread_mutex_lock(&turn);
  int is_new = access(path, F_OK), error = 0, fd = -1;
  if (fails(0, &error)) errno = error; else fd = real(folder, name, flags, mode);
  error = errno;
  if (is_new && fd >= 0) changed(CREATE, path, "", 0, 0);
  pthread_mutex_unlock(&turn);
  errno = error;
  return fd;
}
#define MODE mode_t mode = 0; if (flags & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *path, int flags, ...) { MODE return open_path(AT_FDCWD, path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE return open_path(AT_FDCWD, path, flags, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return open_path(folder, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return open_path(folder, path, flags, mode); }

#define LOCKED(name, call) int error = 0, done = -1; pthread_mutex_lock(&turn); \
  if (below(name) && fails(0, &error)) errno = error; else { done = call; error = errno; } \
  pthread_mutex_unlock(&turn); errno = error; return done
int rename(const char *from, const char *to) { REAL("rename", int, const char *, const char *); LOCKED(from, changed(RENAME, from, to, 0, real(from, to))); }
int unlink(const char *path) { REAL("unlink", int, const char *); LOCKED(path, changed(UNLINK, path, "", 0, real(path))); }
int rmdir(const char *path) { REAL("rmdir", int, const char *); LOCKED(path, changed(UNLINK, path, "", 0, real(path))); }
int unlinkat(int folder, const char *name, int flags) {
  REAL("unlinkat", int, int, const char *, int);
  char whole[4096];
  const char *path = in_folder(folder, name, whole);
  LOCKED(path, changed(UNLINK, path, "", 0, real(folder, name, flags)));
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
  REAL("renameat", int, int, const char *, int, const char *);
  char whole[4096], other[4096];
  const char *path = in_folder(from_folder, from, whole), *target = in_folder(to_folder, to, other);
  LOCKED(path, changed(RENAME, path, target, 0, real(from_folder, from, to_folder, to)));
}
int mkdir(const char *path, mode_t mode) { REAL("mkdir", int, const char *, mode_t); LOCKED(path, changed(MKDIR, path, "", 0, real(path, mode))); }
int truncate(const char *path, off_t size) { REAL("truncate", int, const char *, off_t); LOCKED(path, changed(SIZE, path, "", size, real(path, size))); }
int truncate64(const char *path, off_t size) { return truncate(path, size); }
int ftruncate(int fd, off_t size) {
  REAL("ftruncate", int, int, off_t);
  char path[4096];
  if (!path_of(fd, path)) return real(fd, size);
  LOCKED(path, changed(SIZE, path, "", size, real(fd, size)));
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int posix_fallocate(int fd, off_t offset, off_t size) {
  REAL("posix_fallocate", int, int, off_t, off_t);
  char path[4096];
  if (!path_of(fd, path)) return real(fd, offset, size);
  pthread_mutex_lock(&turn);
  int error = 0;
  error = fails(1, &error) ? ENOSPC : real(fd, offset, size);
  if (!error) changed(EXTEND, path, "", offset + size, 0);
  pthread_mutex_unlock(&turn);
  return error;
}
int posix_fallocate64(int fd, off_t offset, off_t size) { return posix_fallocate(fd, offset, size); }

int clock_gettime(clockid_t which, struct timespec *now) {
  REAL("clock_gettime", int, clockid_t, struct timespec *);
  int done = real(which, now);
  if (!clock_chance || which != CLOCK_REALTIME || done) return done;
  pthread_mutex_lock(&turn);
  now->tv_sec += (long)(throw_dice(&clock_chance) % 630720000u) - 315360000;
  pthread_mutex_unlock(&turn);
  return done;
}
