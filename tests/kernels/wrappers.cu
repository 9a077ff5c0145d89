// A kernel for every wrapper of device_compat.cuh, each thread with its own words of input and output.

#include "kvblocks/device_compat.cuh"

namespace kvb {

struct Params {
    const u32* input; // [threads of the grid, num_in]
    u32* output;      // [threads of the grid, num_out]
    i32 num_in;
    i32 num_out;
};

struct Words {
    const u32* in;
    u32* out;
};

KVB_DEVICE Words words_of(const Params& params) {
    const i64 index = static_cast<i64>(block_x()) * num_threads() + thread_index();
    return {params.input + index * params.num_in, params.output + index * params.num_out};
}

} // namespace kvb

#define TEST(name)                                                                                           \
    namespace kvb {                                                                                          \
    KVB_DEVICE void name(const u32* in, u32* out);                                                           \
    }                                                                                                        \
    KVB_KERNEL(test_##name, kvb::Params, 1024, 1) {                                                          \
        const kvb::Words words = kvb::words_of(params);                                                      \
        kvb::name(words.in, words.out);                                                                      \
    }                                                                                                        \
    KVB_DEVICE void kvb::name([[maybe_unused]] const u32* in, [[maybe_unused]] u32* out)

KVB_KERNEL(test_positions, kvb::Params, 1024, 1) {
    using namespace kvb;
    const i32 block = block_x() + grid_x() * (block_y() + grid_y() * block_z());
    u32* out = params.output + (block * num_threads() + thread_index()) * 8;
    const i32 place[8] = {thread_index(), num_threads(), block_x(), block_y(),
                          block_z(),      grid_x(),      grid_y(),  grid_z()};
    for (i32 i = 0; i < 8; ++i) {
        out[i] = static_cast<u32>(place[i]);
    }
}

TEST(barrier) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    shared[thread_index()] = in[0];
    sync_block();
    out[0] = shared[num_threads() - 1 - thread_index()];
    sync_block();
    shared[thread_index()] = out[0] + 1;
    sync_warp();
    out[1] = shared[thread_index() ^ 9];
}

TEST(shuffle) {
    out[0] = shuffle_xor(in[0], static_cast<i32>(in[1]));
    out[1] = bits_of(shuffle_xor(float_of(in[0]), 16));
}

// Half of the lanes come to the collective by another way, and later.
TEST(shuffle_after_divergence) {
    u32 value = in[0];
    if (thread_index() % 2 == 1) {
        for (u32 i = 0; i < in[1]; ++i) {
            value = value * 5 + 1;
        }
    }
    out[0] = shuffle_xor(value, 1);
}

TEST(count) {
    out[0] = static_cast<u32>(count_lanes((in[0] & 1) != 0));
}

TEST(atomics) {
    u32* shared = reinterpret_cast<u32*>(shared_memory());
    if (thread_index() < 2) {
        shared[thread_index()] = 0;
    }
    sync_block();
    atomic_add(shared, in[0]);
    atomic_max(shared + 1, in[0]);
    sync_block();
    out[0] = shared[0];
    out[1] = shared[1];
    out[2] = 7;
    out[2] = atomic_add(out + 2, 5) << 16 | out[2];
    out[3] = 7;
    const u32 old = atomic_exchange_if(out + 3, in[0] % 2 == 0 ? 7 : 8, in[0]);
    atomic_max(out + 3, 3);
    out[4] = old;
}

TEST(vectors) {
    const Vec16 a = load16(in), b = load_stream(in + 4);
    store16(out, b);
    store16(out + 4, a);
}

TEST(copies) {
    u8* mine = shared_memory() + thread_index() * 32;
    const u8* other = shared_memory() + (thread_index() ^ 1) * 32;
    copy_async(mine, in, 16);
    copy_async_commit();
    copy_async(mine + 16, in + 4, thread_index() % 3 == 0 ? 0 : 16);
    copy_async_commit();
    copy_async_wait<1>();
    sync_block();
    for (i32 i = 0; i < 4; ++i) {
        out[i] = reinterpret_cast<const u32*>(other)[i];
    }
    copy_async_wait<0>();
    sync_block();
    for (i32 i = 4; i < 8; ++i) {
        out[i] = reinterpret_cast<const u32*>(other)[i];
    }
}

// Poison: what a copy that has not been waited for leaves where it goes.
TEST(copies_too_early) {
    u8* mine = shared_memory() + thread_index() * 16;
    copy_async(mine, in, 16);
    copy_async_commit();
    copy_async_wait<1>();
    out[0] = reinterpret_cast<const u32*>(mine)[0];
    copy_async_wait<0>();
}

// Each warp stores 32 rows of 16 bytes and reads them in the order that the fifth words say.
namespace kvb {
KVB_DEVICE const u8* stored_row(const u32* in) {
    u8* rows = shared_memory() + thread_index() / 32 * 512;
    for (i32 i = 0; i < 4; ++i) {
        reinterpret_cast<u32*>(rows + thread_index() % 32 * 16)[i] = in[i];
    }
    sync_warp();
    return rows + in[4] * 16;
}
KVB_DEVICE void put(u32* out, const u32 (&fragment)[4]) {
    for (i32 i = 0; i < 4; ++i) {
        out[i] = fragment[i];
    }
}
} // namespace kvb

TEST(matrices) {
    u32 fragment[4];
    load_matrix_x4(fragment, stored_row(in));
    put(out, fragment);
}

TEST(matrices_transposed) {
    u32 fragment[4];
    load_matrix_x4_transposed(fragment, stored_row(in));
    put(out, fragment);
}

#define MULTIPLY(name)                                                                                       \
    const u32 a[4] = {in[0], in[1], in[2], in[3]};                                                           \
    float c[4] = {float_of(in[6]), float_of(in[7]), float_of(in[8]), float_of(in[9])};                       \
    name(c, a, in[4], in[5]);                                                                                \
    const u32 bits[4] = {bits_of(c[0]), bits_of(c[1]), bits_of(c[2]), bits_of(c[3])};                        \
    put(out, bits);

TEST(products_f16){MULTIPLY(mma_f16)} TEST(products_bf16){MULTIPLY(mma_bf16)}

TEST(exp2) {
    out[0] = bits_of(exp2_approx(float_of(in[0])));
}
TEST(log) {
    out[0] = bits_of(log_f32(float_of(in[0])));
}
TEST(tanh) {
    out[0] = bits_of(tanh_f32(float_of(in[0])));
}
TEST(round) {
    out[0] = static_cast<u32>(round_to_int(float_of(in[0])));
}
TEST(max) {
    out[0] = bits_of(max_f32(float_of(in[0]), float_of(in[1])));
}
TEST(permute) {
    out[0] = permute_bytes(in[0], in[1], in[2]);
}
TEST(from_f16) {
    out[0] = bits_of(f16_to_f32(static_cast<u16>(in[0])));
}
TEST(to_16_bits) {
    const float x = float_of(in[0]);
    out[0] = f32_to_f16(x) | static_cast<u32>(f32_to_bf16(x)) << 16;
}
TEST(to_pairs) {
    const float x = float_of(in[0]), y = float_of(in[1]);
    out[0] = f32_to_f16x2(x, y);
    out[1] = f32_to_bf16x2(x, y);
}
TEST(pairs) {
    out[0] = mul_f16x2(in[0], in[1]);
    out[1] = sub_f16x2(in[0], in[1]);
}
TEST(to_fp8) {
    const float x = float_of(in[0]);
    out[0] = f32_to_e4m3(x) | f32_to_e5m2(x) << 8 | f32_to_e4m3_bits(x) << 16 |
             static_cast<u32>(f32_to_e5m2_bits(x)) << 24;
}
TEST(from_fp8) {
    out[0] = e4m3x2_to_f16x2(static_cast<u16>(in[0]));
    out[1] = e4m3x2_to_f16x2_bits(static_cast<u16>(in[0]));
}
