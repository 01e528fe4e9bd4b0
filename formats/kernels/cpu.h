// Which instruction sets this CPU (and its operating system) can run. Included by the bindings only.
#pragma once

#include <atomic>
#include <cstring>
#include <vector>

#include "kernels.h"

namespace pagestone {

// Tables this CPU can run, the best one last.
inline const std::vector<const Table*>& runnable() {
    static const std::vector<const Table*> tables = [] {
        std::vector<const Table*> found{&scalar::table};
#if defined(__x86_64__)
        __builtin_cpu_init();
        if (__builtin_cpu_supports("avx2")) found.push_back(&avx2::table);
        if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni"))
            found.push_back(&avx512::table);
#endif
        return found;
    }();
    return tables;
}

// The table in use. A kernel call reads it once, so changing it never mixes two sets within a call.
inline std::atomic<const Table*>& chosen() {
    static std::atomic<const Table*> table{runnable().back()};
    return table;
}

// Chooses by name; false, and no change, if this CPU cannot run it or no such set was compiled.
inline bool choose(const char* name) {
    for (const Table* table : runnable())
        if (std::strcmp(table->name, name) == 0) {
            chosen().store(table);
            return true;
        }
    return false;
}

}  // namespace pagestone
