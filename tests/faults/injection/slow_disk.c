/* LD_PRELOAD: each fsync takes 20 ms longer, and adds a byte to the file SLOW_DISK. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

static int slow(const char *name, int file)
{
    int (*real)(int) = (int (*)(int))dlsym(RTLD_NEXT, name);
    int log = open(getenv("SLOW_DISK"), O_WRONLY | O_APPEND);
    if (log >= 0) {
        if (write(log, "x", 1) == 1)
            usleep(20000);
        close(log);
    }
    return real(file);
}

int fsync(int file) { return slow("fsync", file); }
int fdatasync(int file) { return slow("fdatasync", file); }
