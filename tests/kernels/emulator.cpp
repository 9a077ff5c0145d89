// Runs a kernel on a CPU: each thread of a block is a fiber, block after block, on one thread of the system.
//
// Owns barriers, the exchange between lanes, asynchronous copies and the order in which fibers run. x86-64
// only. Invariant: fibers switch at barriers and collectives only; what differs between schedules is a
// missing barrier. Shared memory starts as 0xFF (NaN in every floating-point format); the target of an
// asynchronous copy is 0xFF from its start until its wait, which is when the source is read.

#include "kvblocks/device_compat.cuh"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <sys/mman.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define KVB_SANITIZED 1
#else
#define KVB_SANITIZED 0
#endif

using namespace kvb;
using namespace kvb::host;

// Saves the registers that a call preserves on the stack of `from`, and continues on that of `to`.
extern "C" void kvb_switch(void** from, void* to);
asm(R"(
.text
.globl kvb_switch
.type kvb_switch, @function
kvb_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size kvb_switch, .-kvb_switch
)");

namespace {

constexpr size_t stack_bytes = KVB_SANITIZED ? 512 << 10 : 64 << 10;
constexpr size_t page_bytes = 4096;
constexpr i32 max_threads = 1024;

using Kernel = void (*)(const void*);

enum class Schedule : i32 { forward, reverse, greedy, greedy_reverse, random };

enum class State { ready, in_warp, in_block, done };

struct AsyncCopy {
    u8* shared;
    const u8* global;
    i32 num_bytes, num_valid, group;
};

struct Fiber {
    Position position;
    State state;
    const char* name; // of the barrier or collective that it waits at, or was last in
    void* stack_pointer;
    u8* stack;
    i32 num_groups; // of asynchronous copies, committed
    std::vector<AsyncCopy> copies;
};

// One collective of a warp. Payloads alternate between two sets, so that a fast lane may enter the next
// collective while a slow one has not fetched its result of the last.
struct Warp {
    i32 num_arrived;
    u32 generation;
    const char* name;
    i32 first_lane;
    alignas(16) u8 given[2][warp_size * max_payload];
    alignas(16) u8 taken[2][warp_size * max_payload];
};

std::vector<Fiber> fibers;
std::vector<Warp> warps;
u8* shared;
u32 num_shared_bytes;
Fiber* current;
void* main_stack_pointer;
i32 threads, num_alive, num_in_block;
Schedule schedule;
u64 random_state;
Kernel kernel;
const void* kernel_params;
bool failed;
std::string message;
#if KVB_SANITIZED
const void* main_stack_bottom;
size_t main_stack_bytes;
#endif

u64 next_random() { // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return random_state;
}

// Leaves the stack on which it is called. from: nullptr for the main one.
void switch_stack(Fiber* from, Fiber* to) {
    void** save = from ? &from->stack_pointer : &main_stack_pointer;
    void* next = to ? to->stack_pointer : main_stack_pointer;
    current = to;
    kvb_host_position = to ? &to->position : nullptr;
#if KVB_SANITIZED
    void* fake = nullptr;
    __sanitizer_start_switch_fiber(from && from->state == State::done ? nullptr : &fake,
                                   to ? to->stack : main_stack_bottom, to ? stack_bytes : main_stack_bytes);
    kvb_switch(save, next);
    __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#else
    kvb_switch(save, next);
#endif
}

Fiber* ready_from(i32 first, i32 last, i32 start, i32 step) {
    const i32 count = last - first;
    for (i32 i = 0; i < count; ++i) {
        const i32 index = first + ((start - first + i * step) % count + count) % count;
        if (fibers[static_cast<size_t>(index)].state == State::ready) {
            return &fibers[static_cast<size_t>(index)];
        }
    }
    return nullptr;
}

// The fiber that runs next; nullptr if none can.
Fiber* next_fiber() {
    const i32 last = current ? current->position.thread : schedule == Schedule::greedy_reverse ? threads : -1;
    switch (schedule) {
    case Schedule::forward:
        return ready_from(0, threads, last + 1, 1);
    case Schedule::reverse:
        return ready_from(0, threads, last - 1, -1);
    case Schedule::greedy: // the current warp until it waits at a barrier, then the first that can run
        if (current) {
            const i32 first = last / warp_size * warp_size;
            if (Fiber* fiber = ready_from(first, first + warp_size, last + 1, 1)) {
                return fiber;
            }
        }
        return ready_from(0, threads, 0, 1);
    case Schedule::greedy_reverse:
        if (current) {
            const i32 first = last / warp_size * warp_size;
            if (Fiber* fiber = ready_from(first, first + warp_size, last - 1, -1)) {
                return fiber;
            }
        }
        return ready_from(0, threads, threads - 1, -1);
    case Schedule::random:
        return ready_from(0, threads, static_cast<i32>(next_random() % static_cast<u64>(threads)), 1);
    }
    return nullptr;
}

// Threads in ranges of equal state: "threads 0..31 exited, threads 32..63 at sync_block".
std::string where_all_are() {
    std::string text;
    auto describe = [](const Fiber& fiber) {
        return fiber.state == State::done ? std::string("exited") : std::string("at ") + fiber.name;
    };
    for (i32 first = 0; first < threads;) {
        const std::string state = describe(fibers[static_cast<size_t>(first)]);
        i32 last = first;
        while (last + 1 < threads && describe(fibers[static_cast<size_t>(last + 1)]) == state) {
            ++last;
        }
        text += (text.empty() ? "threads " : ", threads ") + std::to_string(first) + ".." +
                std::to_string(last) + " " + state;
        first = last + 1;
    }
    return text;
}

[[noreturn]] void stop(const std::string& text) {
    failed = true;
    const Position& at = current->position;
    char place[96];
    std::snprintf(place, sizeof(place), " (block %d,%d,%d, thread %d)", at.block_x, at.block_y, at.block_z,
                  at.thread);
    message = text + place;
    switch_stack(current, nullptr);
    std::abort();
}

// Gives way to another fiber; returns when this one is ready again.
void wait() {
    Fiber* next = next_fiber();
    if (next == nullptr) {
        bool diverged = false;
        for (i32 warp = 0; warp < threads / warp_size; ++warp) {
            const Fiber& first = fibers[static_cast<size_t>(warp * warp_size)];
            for (i32 lane = 1; lane < warp_size; ++lane) {
                diverged =
                    diverged || fibers[static_cast<size_t>(warp * warp_size + lane)].state != first.state;
            }
        }
        stop((diverged ? "warp diverged: " : "deadlock: ") + where_all_are());
    }
    if (next != current) {
        switch_stack(current, next);
    }
}

void complete_copies(Fiber& fiber, i32 first_pending_group) {
    auto is_due = [&](const AsyncCopy& copy) { return copy.group < first_pending_group; };
    for (const AsyncCopy& copy : fiber.copies) {
        if (is_due(copy)) {
            std::memcpy(copy.shared, copy.global, static_cast<size_t>(copy.num_valid));
            std::memset(copy.shared + copy.num_valid, 0,
                        static_cast<size_t>(copy.num_bytes - copy.num_valid));
        }
    }
    fiber.copies.erase(std::remove_if(fiber.copies.begin(), fiber.copies.end(), is_due), fiber.copies.end());
}

void release_block() {
    if (num_in_block == threads) {
        num_in_block = 0;
        for (i32 thread = 0; thread < threads; ++thread) {
            fibers[static_cast<size_t>(thread)].state = State::ready;
        }
    }
}

void run_fiber() {
#if KVB_SANITIZED
    const void* bottom;
    size_t num_bytes;
    __sanitizer_finish_switch_fiber(nullptr, &bottom, &num_bytes);
    if (main_stack_bottom == nullptr) { // the first fiber of all is entered from the main stack
        main_stack_bottom = bottom;
        main_stack_bytes = num_bytes;
    }
#endif
    kernel(kernel_params);
    if (!current->copies.empty()) {
        stop("exit with asynchronous copies that nothing waits for");
    }
    current->state = State::done;
    current->name = "exit";
    --num_alive;
    // A thread that exits before a barrier leaves the others waiting there, so that an early return is found.
    Fiber* next = next_fiber();
    if (next == nullptr && num_alive > 0) {
        wait();
    }
    switch_stack(current, next);
    std::abort();
}

u8* make_stack() {
    // The page below the stack faults, so that an overflow is not silent.
    void* memory = mmap(nullptr, stack_bytes + page_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED || mprotect(memory, page_bytes, PROT_NONE) != 0) {
        std::perror("emulator: no memory for a stack");
        std::abort();
    }
    return static_cast<u8*>(memory) + page_bytes;
}

void prepare(Fiber& fiber, const Position& position) {
    fiber.position = position;
    fiber.state = State::ready;
    fiber.name = "start";
    fiber.num_groups = 0;
    fiber.copies.clear();
#if KVB_SANITIZED
    __asan_unpoison_memory_region(fiber.stack, stack_bytes); // what the last fiber's frames have left
#endif
    auto* top = reinterpret_cast<u64*>(fiber.stack + stack_bytes);
    *--top = 0; // where run_fiber would return to; it never does, and this aligns its frame
    *--top = reinterpret_cast<u64>(&run_fiber);
    for (int i = 0; i < 6; ++i) {
        *--top = 0;
    }
    fiber.stack_pointer = top;
}

bool run_block(i32 x, i32 y, i32 z, const i32 (&grid)[3]) {
    std::memset(shared, 0xFF, num_shared_bytes);
    for (i32 thread = 0; thread < threads; ++thread) {
        prepare(fibers[static_cast<size_t>(thread)],
                Position{thread, threads, x, y, z, grid[0], grid[1], grid[2]});
    }
    for (Warp& warp : warps) {
        warp.num_arrived = 0;
        warp.generation = 0;
    }
    num_alive = threads;
    num_in_block = 0;
    current = nullptr;
    switch_stack(nullptr, next_fiber());
    return !failed;
}

} // namespace

extern "C" {

const Position* kvb_host_position;

u8* kvb_host_shared_memory() {
    return shared;
}

void kvb_host_fail(const char* text) {
    stop(text);
}

void kvb_host_sync_block(const char* name) {
    current->state = State::in_block;
    current->name = name;
    ++num_in_block;
    release_block();
    if (current->state == State::in_block) {
        wait();
    } else if (schedule == Schedule::reverse || schedule == Schedule::random) {
        wait(); // the last to arrive need not be the first to go on
    }
}

void kvb_host_collective(const char* name, const void* given, i32 given_bytes, void* taken, i32 taken_bytes,
                         Combine combine) {
    const i32 thread = current->position.thread;
    const i32 lane = thread % warp_size;
    Warp& warp = warps[static_cast<size_t>(thread / warp_size)];
    const u32 set = warp.generation & 1u;
    if (warp.num_arrived == 0) {
        warp.name = name;
        warp.first_lane = lane;
    } else if (std::strcmp(warp.name, name) != 0) {
        stop("warp diverged: lane " + std::to_string(warp.first_lane) + " at " + warp.name + ", lane " +
             std::to_string(lane) + " at " + name);
    }
    if (given_bytes > 0) {
        std::memcpy(warp.given[set] + lane * max_payload, given, static_cast<size_t>(given_bytes));
    }
    current->name = name;
    if (++warp.num_arrived < warp_size) {
        current->state = State::in_warp;
        wait();
    } else {
        combine(warp.given[set], warp.taken[set]);
        warp.num_arrived = 0;
        ++warp.generation;
        for (i32 other = thread - lane; other < thread - lane + warp_size; ++other) {
            Fiber& fiber = fibers[static_cast<size_t>(other)];
            if (fiber.state == State::in_warp) {
                fiber.state = State::ready;
            }
        }
    }
    if (taken_bytes > 0) {
        std::memcpy(taken, warp.taken[set] + lane * max_payload, static_cast<size_t>(taken_bytes));
    }
}

void kvb_host_copy_async(void* to, const void* from, i32 num_bytes, i32 num_valid) {
    auto* target = static_cast<u8*>(to);
    if (target < shared || target + num_bytes > shared + num_shared_bytes) {
        stop("copy_async: the target is outside shared memory");
    }
    std::memset(target, 0xFF, static_cast<size_t>(num_bytes));
    current->copies.push_back(
        {target, static_cast<const u8*>(from), num_bytes, num_valid, current->num_groups});
}

void kvb_host_copy_async_commit() {
    ++current->num_groups;
}

void kvb_host_copy_async_wait(i32 pending) {
    complete_copies(*current, current->num_groups - pending);
}

// Runs a grid. Returns 0, or 1 with a message. Not reentrant.
i32 kvb_emulate(Kernel entry, const void* params, const i32 (&grid)[3], i32 block_threads, u32 shared_bytes,
                i32 order, u64 seed, char* text, u64 text_bytes) {
    failed = false;
    message.clear();
    if (block_threads < warp_size || block_threads > max_threads || block_threads % warp_size != 0) {
        std::snprintf(text, text_bytes, "%d threads a block: expected a multiple of 32 up to 1024",
                      block_threads);
        return 1;
    }
    kernel = entry;
    kernel_params = params;
    threads = block_threads;
    schedule = static_cast<Schedule>(order);
    random_state = seed * 2 + 1;
    while (fibers.size() < static_cast<size_t>(max_threads)) {
        fibers.push_back(Fiber{});
        fibers.back().stack = make_stack();
    }
    warps.resize(max_threads / warp_size);
    num_shared_bytes = shared_bytes;
    shared = static_cast<u8*>(std::aligned_alloc(16, (shared_bytes + 31) / 16 * 16));
    const bool backwards = schedule == Schedule::reverse || schedule == Schedule::greedy_reverse;
    bool good = true;
    const i64 num_blocks = static_cast<i64>(grid[0]) * grid[1] * grid[2];
    for (i64 i = 0; i < num_blocks && good; ++i) {
        const i64 index = backwards ? num_blocks - 1 - i : i;
        good = run_block(static_cast<i32>(index % grid[0]), static_cast<i32>(index / grid[0] % grid[1]),
                         static_cast<i32>(index / grid[0] / grid[1]), grid);
    }
    std::free(shared);
    shared = nullptr;
    std::snprintf(text, text_bytes, "%s", message.c_str());
    return good ? 0 : 1;
}
}
