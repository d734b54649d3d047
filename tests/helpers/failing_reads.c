/* LD_PRELOAD library: opening and reading chosen files fails, as on a file server that has a fault.

   The file that FAILING_READS names is mapped: the error number, how often it is still returned, and a part of the
   paths. Whoever writes that file switches the fault on and off while the process runs. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct control {
    int number; /* errno of the fault */
    int left;   /* calls that still fail */
    char part[1024];
};

static struct control *control;

__attribute__((constructor)) static void map_control(void) {
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open64");
    int file = real(getenv("FAILING_READS"), O_RDWR);
    void *mapped = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || mapped == MAP_FAILED) {
        perror("FAILING_READS");
        _exit(99);
    }
    control = mapped;
}

static int fails(const char *path) {
    if (control == NULL || control->left <= 0 || strstr(path, control->part) == NULL)
        return 0;
    if (__sync_fetch_and_sub(&control->left, 1) <= 0)
        return 0;
    errno = control->number;
    return 1;
}

static int read_fails(int file) {
    char link[64], path[4096];
    if (control == NULL || control->left <= 0)
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0)
        return 0;
    path[length] = 0;
    return fails(path);
}

#define OPENING(name)                                                                                                  \
    int name(const char *path, int flags, ...) {                                                                       \
        int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, #name);                                                 \
        va_list arguments;                                                                                             \
        va_start(arguments, flags);                                                                                    \
        mode_t mode = va_arg(arguments, mode_t);                                                                       \
        va_end(arguments);                                                                                             \
        /* ESTALE is what opening returns; EIO comes from reading. */                                                  \
        if (control != NULL && control->number == ESTALE && (flags & O_ACCMODE) == O_RDONLY && fails(path))            \
            return -1;                                                                                                 \
        return real(path, flags, mode);                                                                                \
    }

OPENING(open)
OPENING(open64)

ssize_t read(int file, void *buffer, size_t count) {
    ssize_t (*real)(int, void *, size_t) = dlsym(RTLD_NEXT, "read");
    return read_fails(file) ? -1 : real(file, buffer, count);
}

#define READING_AT(name)                                                                                               \
    ssize_t name(int file, void *buffer, size_t count, off64_t offset) {                                               \
        ssize_t (*real)(int, void *, size_t, off64_t) = dlsym(RTLD_NEXT, #name);                                       \
        return read_fails(file) ? -1 : real(file, buffer, count, offset);                                              \
    }

READING_AT(pread)
READING_AT(pread64)
