#include "pool.h"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagestone {
namespace {

// Products follow one another closely: who sleeps at once is woken too late.
constexpr std::chrono::microseconds PATIENCE{50};
constexpr std::size_t MOST_THREADS = 256;

void relax() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

// Whether `ready` came true within PATIENCE.
template <class Ready>
bool spin(const Ready& ready) {
    const auto end = std::chrono::steady_clock::now() + PATIENCE;
    do {
        for (int i = 0; i < 32; ++i) {
            if (ready()) return true;
            relax();
        }
    } while (std::chrono::steady_clock::now() < end);
    return false;
}

class Pool {
  public:
    // False if the pool is busy.
    bool run(std::size_t threads, std::size_t count, Task what, void* with) {
        const std::unique_lock<std::mutex> alone(busy, std::try_to_lock);
        if (!alone.owns_lock()) return false;
        while (workers + 1 < threads && workers + 1 < MOST_THREADS && add_worker()) {
        }
        {
            const std::lock_guard<std::mutex> guard(lock);
            task = what, context = with, total = count;
            next.store(0);
            seats = threads - 1;
            round.fetch_add(1);
        }
        wake.notify_all();
        work(0);
        std::unique_lock<std::mutex> guard(lock);
        seats = 0;  // who has not come by now need not
        guard.unlock();
        spin([&] { return active.load() == 0; });
        guard.lock();
        done.wait(guard, [&] { return active.load() == 0; });
        return true;
    }

  private:
    void work(std::size_t slot) {
        for (std::size_t i; (i = next.fetch_add(1)) < total;) task(context, slot, i);
    }

    void serve() {
        const PlainFloats plain;
        std::uint64_t seen = 0;
        for (;;) {
            spin([&] { return round.load() != seen; });
            std::unique_lock<std::mutex> guard(lock);
            wake.wait(guard, [&] { return round.load() != seen; });
            seen = round.load();
            if (seats == 0) continue;
            const std::size_t slot = seats--;
            active.fetch_add(1);
            guard.unlock();
            work(slot);
            guard.lock();
            if (active.fetch_sub(1) == 1) done.notify_one();
        }
    }

    bool add_worker() {
        sigset_t every, before;
        sigfillset(&every);
        pthread_sigmask(SIG_SETMASK, &every, &before);  // signals are for the program's own threads
        bool added = true;
        try {
            std::thread([this] { serve(); }).detach();
            ++workers;
        } catch (const std::system_error&) {
            added = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        return added;
    }

    std::mutex busy, lock;
    std::condition_variable wake, done;
    std::atomic<std::uint64_t> round{0};
    std::atomic<std::size_t> next{0}, active{0};
    std::size_t workers = 0, seats = 0, total = 0;
    Task task = nullptr;
    void* context = nullptr;
};

// Never deleted: its threads end with the process. A forked child has none of them and makes its own.
std::atomic<Pool*> current{nullptr};

Pool& pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { current.store(nullptr); });
    (void)registered;
    Pool* found = current.load();
    if (!found) {
        Pool* made = new Pool;
        if (current.compare_exchange_strong(found, made))
            found = made;
        else
            delete made;
    }
    return *found;
}

struct Memory {
    unsigned char* bytes = nullptr;
    std::size_t size = 0;
    ~Memory() { release(); }
    void release() {
        if (bytes) ::operator delete(bytes, std::align_val_t(64));
        bytes = nullptr, size = 0;
    }
};

}  // namespace

void parallel(std::size_t threads, std::size_t count, Task task, void* context) {
    if (threads > count) threads = count;
    if (threads > 1 && pool().run(threads, count, task, context)) return;
    for (std::size_t i = 0; i < count; ++i) task(context, 0, i);
}

unsigned char* buffer(Buffer which, std::size_t bytes) {
    static thread_local Memory memory[2];
    Memory& found = memory[which];
    if (found.size < bytes) {
        found.release();
        found.bytes = static_cast<unsigned char*>(::operator new(bytes, std::align_val_t(64)));
        found.size = bytes;
    }
    return found.bytes;
}

#if defined(__x86_64__)
PlainFloats::PlainFloats() : before(_mm_getcsr()) { _mm_setcsr(0x1F80); }
PlainFloats::~PlainFloats() { _mm_setcsr(static_cast<unsigned>(before)); }
#elif defined(__aarch64__)
PlainFloats::PlainFloats() {
    __asm__ __volatile__("mrs %0, fpcr" : "=r"(before));
    __asm__ __volatile__("msr fpcr, %0" : : "r"(0ull));
}
PlainFloats::~PlainFloats() { __asm__ __volatile__("msr fpcr, %0" : : "r"(before)); }
#else
PlainFloats::PlainFloats() : before(0) {}
PlainFloats::~PlainFloats() {}
#endif

}  // namespace pagestone
