// The host twin of every wrapper of device_compat.cuh, for an emulator in which each thread of a block is a
// fiber.
//
// Owns what an instruction computes; where a thread is, barriers and the exchange between lanes are the
// emulator's, declared here and defined in tests/kernels/emulator.cpp. Included by device_compat.cuh only,
// after its types. Invariant: a twin gives bit for bit what its instruction gives, exp2, log and tanh aside,
// and calls `fail` where a device would fault or the result would be undefined.
#pragma once

namespace kvb {
namespace host {

struct Position {
    i32 thread, num_threads;
    i32 block_x, block_y, block_z;
    i32 grid_x, grid_y, grid_z;
};

constexpr i32 warp_size = 32;
// Bytes that a lane gives to, and gets from, a collective.
constexpr i32 max_payload = 32;
// All lanes' payloads, lane after lane, max_payload bytes apart.
using Combine = void (*)(const u8* given, u8* taken);

extern "C" {
extern const Position* kvb_host_position;
u8* kvb_host_shared_memory();
// Ends the launch with a message; does not return.
[[noreturn]] void kvb_host_fail(const char* message);
void kvb_host_sync_block(const char* name);
// Returns once all lanes of the warp have given their payload under the same name.
void kvb_host_collective(const char* name, const void* given, i32 given_bytes, void* taken, i32 taken_bytes,
                         Combine combine);
void kvb_host_copy_async(void* shared, const void* global, i32 num_bytes, i32 num_valid);
void kvb_host_copy_async_commit();
void kvb_host_copy_async_wait(i32 pending);
}

template <typename T>
inline T read(const void* from) {
    T value;
    __builtin_memcpy(&value, from, sizeof(T));
    return value;
}
template <typename T>
inline void write(void* to, T value) {
    __builtin_memcpy(to, &value, sizeof(T));
}

inline void check_aligned(const void* address, u64 num_bytes, const char* message) {
    if (reinterpret_cast<u64>(address) % num_bytes != 0) {
        kvb_host_fail(message);
    }
}

} // namespace host

inline i32 thread_index() {
    return host::kvb_host_position->thread;
}
inline i32 num_threads() {
    return host::kvb_host_position->num_threads;
}
inline i32 block_x() {
    return host::kvb_host_position->block_x;
}
inline i32 block_y() {
    return host::kvb_host_position->block_y;
}
inline i32 block_z() {
    return host::kvb_host_position->block_z;
}
inline i32 grid_x() {
    return host::kvb_host_position->grid_x;
}
inline i32 grid_y() {
    return host::kvb_host_position->grid_y;
}
inline i32 grid_z() {
    return host::kvb_host_position->grid_z;
}
inline u8* shared_memory() {
    return host::kvb_host_shared_memory();
}

inline void sync_block() {
    host::kvb_host_sync_block("sync_block");
}
inline void sync_warp() {
    host::kvb_host_collective("sync_warp", nullptr, 0, nullptr, 0, [](const u8*, u8*) {});
}

namespace host {
struct Shuffle {
    u32 value;
    i32 lane_mask;
};
inline u32 shuffle_xor_bits(u32 value, i32 lane_mask) {
    const Shuffle given{value, lane_mask};
    u32 taken = 0;
    kvb_host_collective(
        "shuffle_xor", &given, sizeof(given), &taken, sizeof(taken), [](const u8* all, u8* out) {
            for (i32 lane = 0; lane < warp_size; ++lane) {
                const i32 other = lane ^ read<Shuffle>(all + lane * max_payload).lane_mask;
                write(out + lane * max_payload, read<Shuffle>(all + other * max_payload).value);
            }
        });
    return taken;
}
} // namespace host

inline u32 bits_of(float value) {
    return host::read<u32>(&value);
}
inline float float_of(u32 bits) {
    return host::read<float>(&bits);
}
inline float shuffle_xor(float value, i32 lane_mask) {
    return float_of(host::shuffle_xor_bits(bits_of(value), lane_mask));
}
inline u32 shuffle_xor(u32 value, i32 lane_mask) {
    return host::shuffle_xor_bits(value, lane_mask);
}
inline i32 count_lanes(bool yes) {
    const i32 given = yes ? 1 : 0;
    i32 taken = 0;
    host::kvb_host_collective("count_lanes", &given, 4, &taken, 4, [](const u8* all, u8* out) {
        i32 count = 0;
        for (i32 lane = 0; lane < host::warp_size; ++lane) {
            count += host::read<i32>(all + lane * host::max_payload);
        }
        for (i32 lane = 0; lane < host::warp_size; ++lane) {
            host::write(out + lane * host::max_payload, count);
        }
    });
    return taken;
}

// Fibers switch at barriers and collectives only, so plain memory accesses are atomic.
inline u32 atomic_add(u32* address, u32 value) {
    const u32 old = *address;
    *address = old + value;
    return old;
}
inline void atomic_max(u32* address, u32 value) {
    *address = value > *address ? value : *address;
}
inline u32 atomic_exchange_if(u32* address, u32 expected, u32 value) {
    const u32 old = *address;
    if (old == expected) {
        *address = value;
    }
    return old;
}

inline Vec16 load16(const void* address) {
    host::check_aligned(address, 16, "load16: misaligned address");
    return *static_cast<const Vec16*>(address);
}
inline Vec16 load_stream(const void* address) {
    host::check_aligned(address, 16, "load_stream: misaligned address");
    return *static_cast<const Vec16*>(address);
}
inline void store16(void* address, Vec16 value) {
    host::check_aligned(address, 16, "store16: misaligned address");
    *static_cast<Vec16*>(address) = value;
}

inline void copy_async(void* shared, const void* global, i32 num_valid) {
    host::check_aligned(shared, 16, "copy_async: misaligned address in shared memory");
    host::check_aligned(global, 16, "copy_async: misaligned address in global memory");
    host::kvb_host_copy_async(shared, global, 16, num_valid);
}
inline void copy_async_commit() {
    host::kvb_host_copy_async_commit();
}
template <i32 pending>
inline void copy_async_wait() {
    host::kvb_host_copy_async_wait(pending);
}

// --- Conversions, by bit operations.

inline float f16_to_f32(u16 bits) {
    const u32 sign = static_cast<u32>(bits & 0x8000u) << 16;
    const u32 magnitude = bits & 0x7FFFu;
    if (magnitude > 0x7C00u) {
        return float_of(0x7FFFFFFFu);
    }
    if (magnitude == 0x7C00u) {
        return float_of(sign | 0x7F800000u);
    }
    // The exponent's bias goes from 15 to 127 by a product that is exact, denormals included.
    return float_of(sign | bits_of(float_of(magnitude << 13) * 0x1p112f));
}
inline u16 f32_to_f16(float x) {
    const u32 bits = bits_of(x);
    const u32 magnitude = bits & 0x7FFFFFFFu;
    const u32 sign = bits >> 16 & 0x8000u;
    if (magnitude > 0x7F800000u) {
        return 0x7FFF;
    }
    u32 code;
    if (magnitude < 0x38800000u) { // below 2^-14: a multiple of 2^-24, which adding 1/2 rounds to
        code = bits_of(float_of(magnitude) + 0.5f) - 0x3F000000u;
    } else {
        code = (magnitude + 0xFFFu + (magnitude >> 13 & 1u)) >> 13;
        code = code > 0x7C00u + 0x1C000u ? 0x7C00u : code - 0x1C000u;
    }
    return static_cast<u16>(sign | code);
}
inline u16 f32_to_bf16(float x) {
    const u32 bits = bits_of(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return 0x7FFF;
    }
    return static_cast<u16>((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
}
inline half2 f32_to_f16x2(float low, float high) {
    return f32_to_f16(low) | static_cast<u32>(f32_to_f16(high)) << 16;
}
inline u32 f32_to_bf16x2(float low, float high) {
    return f32_to_bf16(low) | static_cast<u32>(f32_to_bf16(high)) << 16;
}
inline half2 mul_f16x2(half2 a, half2 b) {
    // The product of two float16 fits float32, so it is rounded once.
    return f32_to_f16x2(f16_to_f32(static_cast<u16>(a)) * f16_to_f32(static_cast<u16>(b)),
                        f16_to_f32(static_cast<u16>(a >> 16)) * f16_to_f32(static_cast<u16>(b >> 16)));
}
inline half2 sub_f16x2(half2 a, half2 b) {
    // float32 holds more than twice the bits of float16 and two, so rounding twice gives what rounding once
    // does.
    return f32_to_f16x2(f16_to_f32(static_cast<u16>(a)) - f16_to_f32(static_cast<u16>(b)),
                        f16_to_f32(static_cast<u16>(a >> 16)) - f16_to_f32(static_cast<u16>(b >> 16)));
}

// --- Arithmetic.

inline float exp2_approx(float x) {
    const float y = __builtin_exp2f(x);
    return y < 0x1p-126f ? 0.0f : y; // a NaN stays
}
inline float log_f32(float x) {
    return __builtin_logf(x);
}
inline float tanh_f32(float x) {
    return __builtin_tanhf(x);
}
inline i32 round_to_int(float x) {
    if (x != x) {
        return 0;
    }
    const float rounded = __builtin_nearbyintf(x);
    return rounded >= 0x1p31f ? 0x7FFFFFFF : rounded < -0x1p31f ? -0x7FFFFFFF - 1 : static_cast<i32>(rounded);
}
inline float max_f32(float a, float b) {
    if (a != a && b != b) {
        return float_of(0x7FFFFFFFu);
    }
    if (a == 0.0f && b == 0.0f) { // +0 is the larger one
        return float_of(bits_of(a) & bits_of(b));
    }
    return a != a ? b : b != b ? a : a > b ? a : b;
}
inline u32 permute_bytes(u32 a, u32 b, u32 selector) {
    const u64 both = static_cast<u64>(b) << 32 | a;
    u32 result = 0;
    for (u32 i = 0; i < 4; ++i) {
        const u32 byte = selector >> (4 * i) & 7u;
        result |= static_cast<u32>(both >> (8 * byte) & 0xFFu) << (8 * i);
    }
    return result;
}

// --- Tensor cores.

namespace host {
struct MmaGiven {
    u32 a[4], b[2];
};
struct MmaTaken {
    float sum[4];
};
struct Rows {
    const u8* row;
};
struct Fragment {
    u32 word[4];
};

inline float low_f16(u32 word) {
    return f16_to_f32(static_cast<u16>(word));
}
inline float low_bf16(u32 word) {
    return float_of(word << 16);
}

// Products of a [16, 16] and b [16, 8], from the fragments of all lanes.
template <float (*low)(u32)>
inline void multiply(const u8* given, u8* taken) {
    float a[16][16], b[16][8], c[16][8] = {};
    for (i32 lane = 0; lane < warp_size; ++lane) {
        const MmaGiven mine = read<MmaGiven>(given + lane * max_payload);
        const i32 row = lane / 4, pair = lane % 4 * 2;
        for (i32 half = 0; half < 2; ++half) {
            const i32 shift = 16 * half;
            a[row][pair + half] = low(mine.a[0] >> shift);
            a[row + 8][pair + half] = low(mine.a[1] >> shift);
            a[row][pair + 8 + half] = low(mine.a[2] >> shift);
            a[row + 8][pair + 8 + half] = low(mine.a[3] >> shift);
            b[pair + half][row] = low(mine.b[0] >> shift);
            b[pair + 8 + half][row] = low(mine.b[1] >> shift);
        }
    }
    for (i32 row = 0; row < 16; ++row) {
        for (i32 k = 0; k < 16; ++k) {
            for (i32 column = 0; column < 8; ++column) {
                c[row][column] += a[row][k] * b[k][column];
            }
        }
    }
    for (i32 lane = 0; lane < warp_size; ++lane) {
        const i32 row = lane / 4, pair = lane % 4 * 2;
        write(taken + lane * max_payload,
              MmaTaken{{c[row][pair], c[row][pair + 1], c[row + 8][pair], c[row + 8][pair + 1]}});
    }
}

inline void mma(const char* name, float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1, Combine combine) {
    const MmaGiven given{{a[0], a[1], a[2], a[3]}, {b0, b1}};
    MmaTaken taken;
    kvb_host_collective(name, &given, sizeof(given), &taken, sizeof(taken), combine);
    for (i32 i = 0; i < 4; ++i) {
        c[i] += taken.sum[i];
    }
}

template <bool transposed>
inline void load_matrix(const char* name, u32 (&fragment)[4], const void* row) {
    check_aligned(row, 16, "load_matrix: misaligned address");
    const Rows given{static_cast<const u8*>(row)};
    Fragment taken;
    kvb_host_collective(name, &given, sizeof(given), &taken, sizeof(taken), [](const u8* all, u8* out) {
        for (i32 lane = 0; lane < warp_size; ++lane) {
            Fragment mine;
            for (i32 matrix = 0; matrix < 4; ++matrix) {
                u32 word = 0;
                for (i32 half = 0; half < 2; ++half) {
                    const i32 r = transposed ? lane % 4 * 2 + half : lane / 4;
                    const i32 c = transposed ? lane / 4 : lane % 4 * 2 + half;
                    const u8* from = read<Rows>(all + (8 * matrix + r) * max_payload).row;
                    word |= static_cast<u32>(read<u16>(from + 2 * c)) << (16 * half);
                }
                mine.word[matrix] = word;
            }
            write(out + lane * max_payload, mine);
        }
    });
    for (i32 i = 0; i < 4; ++i) {
        fragment[i] = taken.word[i];
    }
}
} // namespace host

inline void load_matrix_x4(u32 (&fragment)[4], const void* row) {
    host::load_matrix<false>("load_matrix_x4", fragment, row);
}
inline void load_matrix_x4_transposed(u32 (&fragment)[4], const void* row) {
    host::load_matrix<true>("load_matrix_x4_transposed", fragment, row);
}
inline void mma_f16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host::mma("mma_f16", c, a, b0, b1, host::multiply<host::low_f16>);
}
inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    host::mma("mma_bf16", c, a, b0, b1, host::multiply<host::low_bf16>);
}

} // namespace kvb
