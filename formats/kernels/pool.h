// Threads for one call at a time, kept between calls. Compiled once, for every instruction set.
#pragma once

#include <cstddef>

namespace pagestone {

// Calls task(context, slot, i) once for every i < count, on the calling thread and up to threads - 1 others, and returns
// when all are done. `slot` is below `threads` and no other running call's. A call made while another is running, or
// one that finds no threads, does everything itself, in slot 0.
using Task = void (*)(void* context, std::size_t slot, std::size_t index);
void parallel(std::size_t threads, std::size_t count, Task task, void* context);

// Buffers of the calling thread, aligned to 64, valid until it asks again for the same one.
enum Buffer { PREPARED = 0, SCRATCH = 1 };
unsigned char* buffer(Buffer which, std::size_t bytes);

// While it lives the calling thread rounds to nearest even and keeps subnormals, whatever the process chose.
class PlainFloats {
  public:
    PlainFloats();
    ~PlainFloats();
    PlainFloats(const PlainFloats&) = delete;
    PlainFloats& operator=(const PlainFloats&) = delete;

  private:
    unsigned long long before;
};

}  // namespace pagestone
