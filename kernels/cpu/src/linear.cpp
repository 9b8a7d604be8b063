// y = x W^T (+ bias, + residual) for weights that are packed once.
//
// Packed weights: [panels][units][COLUMNS] units, a panel being COLUMNS outputs: one stream of memory from begin to end.
// Rows are packed too, for the time of a call: [blocks][units][rows of a block]. Outputs and inner elements that are not
// there are zeros.
#include "linear.h"

#include <cstdlib>

#include "pool.h"

namespace gllm {
namespace {

constexpr int64_t PIECE_UNITS = 256;         // weights of a piece: 32 KiB, two thirds of a first-level cache
constexpr int64_t TILE_BLOCKS = 126 / ROWS;  // rows of a tile: their sums are 16 KiB
constexpr int64_t AHEAD_BYTES = 8192;        // how far ahead memory is asked for when there is one block of rows

int64_t divide_up(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Memory of the calling thread that grows and stays.
uint32_t* scratch(int64_t units) {
  static thread_local uint32_t* memory = nullptr;
  static thread_local int64_t size = 0;
  if (units > size) {
    free(memory);
    size = divide_up(units, 1024) * 1024;
    memory = static_cast<uint32_t*>(aligned_alloc(64, size * 4));
    if (!memory) abort();
  }
  return memory;
}

template <class Format>
int64_t units_of(int64_t inner) {
  return divide_up(inner, Format::PER_UNIT);
}

// Unit `unit` of a row of `inner` elements.
template <class Format>
uint32_t unit_of(const typename Format::type* row, int64_t unit, int64_t inner) {
  uint32_t found = 0;
  int64_t first = unit * Format::PER_UNIT, left = inner - first;
  if (left >= Format::PER_UNIT)
    memcpy(&found, row + first, 4);
  else
    memcpy(&found, row + first, left * sizeof *row);
  return found;
}

template <class Format>
void pack(const typename Format::type* weight, int64_t outputs, int64_t inner, uint32_t* packed) {
  const int64_t units = units_of<Format>(inner);
  parallel_for(divide_up(outputs, COLUMNS), [&](int64_t panel) {
    for (int64_t column = 0; column < COLUMNS; column++) {
      const int64_t output = panel * COLUMNS + column;
      uint32_t* to = packed + panel * units * COLUMNS + column;
      for (int64_t unit = 0; unit < units; unit++)
        to[unit * COLUMNS] = output < outputs ? unit_of<Format>(weight + output * inner, unit, inner) : 0;
    }
  });
}

// Rows `ids` of the weights that were packed.
template <class Format>
void unpack_rows(const uint32_t* packed, int64_t inner, const int64_t* ids, int64_t count, typename Format::type* rows) {
  const int64_t units = units_of<Format>(inner);
  parallel_for(count, [&](int64_t index) {
    const uint32_t* from = packed + ids[index] / COLUMNS * units * COLUMNS + ids[index] % COLUMNS;
    typename Format::type* to = rows + index * inner;
    for (int64_t unit = 0; unit < units; unit++) {
      int64_t first = unit * Format::PER_UNIT, left = inner - first;
      memcpy(to + first, from + unit * COLUMNS, left >= Format::PER_UNIT ? 4 : left * sizeof *to);
    }
  });
}

// One call. Rows are cut into blocks of `height` rows (the last may have fewer), blocks into tiles.
template <class Format>
struct Product {
  using T = typename Format::type;
  const T* x;
  int64_t x_stride, rows;
  const uint32_t* weight;
  int64_t inner, outputs;
  const T* bias;
  const T* residual;
  T* y;
  int64_t y_stride;

  int64_t units = units_of<Format>(inner);
  int64_t height = divide_up(rows, divide_up(rows, ROWS));
  int64_t blocks = divide_up(rows, height);
  int64_t tiles_down = divide_up(blocks, TILE_BLOCKS);
  uint32_t* packed = scratch(blocks * height * units);

  void run() {
    if (rows > ROWS)
      parallel_for(blocks, [&](int64_t block) { pack_block(block); });
    else
      pack_block(0);
    parallel_for(divide_up(outputs, COLUMNS) * tiles_down, [&](int64_t tile) {
      compute(tile / tiles_down, tile % tiles_down * TILE_BLOCKS);
    });
  }

  int64_t rows_of(int64_t block) const { return block + 1 < blocks ? height : rows - block * height; }

  void pack_block(int64_t block) {
    uint32_t* to = packed + block * height * units;
    for (int64_t row = 0; row < rows_of(block); row++)
      for (int64_t unit = 0; unit < units; unit++)
        to[unit * height + row] = unit_of<Format>(x + (block * height + row) * x_stride, unit, inner);
  }

  // All outputs of a panel for the blocks of a tile. Weights are taken piece by piece, so that they stay in the first
  // cache for all blocks; meanwhile the next piece is fetched.
  void compute(int64_t panel, int64_t first_block) {
    alignas(64) float sums[TILE_BLOCKS * ROWS * COLUMNS];
    const int64_t end = first_block + TILE_BLOCKS < blocks ? first_block + TILE_BLOCKS : blocks, count = end - first_block;
    const int64_t most = count == 1 ? units : PIECE_UNITS;
    for (int64_t unit = 0; unit < units; unit += most) {
      Piece piece{weight + (panel * units + unit) * COLUMNS, nullptr, height, unit + most < units ? most : units - unit,
                  nullptr, COLUMNS * 4 / count};
      const char* next = reinterpret_cast<const char*>(piece.w) + (count == 1 ? AHEAD_BYTES : piece.units * COLUMNS * 4);
      for (int64_t block = 0; block < count; block++) {
        piece.x = packed + ((first_block + block) * units + unit) * height;
        piece.ahead = next + block * piece.units * piece.step;
        add_units<Format>(rows_of(first_block + block), sums + block * height * COLUMNS, piece, unit == 0);
      }
    }
    finish(panel, first_block * height, (end == blocks ? rows : end * height) - first_block * height, sums);
  }

  void finish(int64_t panel, int64_t first_row, int64_t count, const float* sums) {
    const int64_t column = panel * COLUMNS, width = outputs - column < COLUMNS ? outputs - column : COLUMNS;
    for (int64_t row = 0; row < count; row++) {
      T* to = y + (first_row + row) * y_stride + column;
      const T* added = residual ? residual + (first_row + row) * y_stride + column : nullptr;
      for (int64_t at = 0; at < width; at += W) finish_vector(to + at, sums + row * COLUMNS + at, column + at, width - at, added ? added + at : nullptr);
    }
  }

  void finish_vector(T* to, const float* sums, int64_t output, int64_t left, const T* added) {
    vf sum = load(sums);
    if (left < W) {
      if (bias) sum += load_part(bias + output, left);
      if (added) sum += load_part(added, left);
      return store_part(to, sum, left);
    }
    if (bias) sum += load(bias + output);
    if (added) sum += load(added);
    store(to, sum);
  }
};

}  // namespace
}  // namespace gllm

using gllm::bf16;

// weight [outputs][inner] -> packed, gllm_packed_units(...) units. Bfloat16 where `half`, else float32.
extern "C" void gllm_pack(int32_t half, const void* weight, int64_t outputs, int64_t inner, uint32_t* packed) {
  if (half)
    gllm::pack<gllm::Bfloat16>(static_cast<const bf16*>(weight), outputs, inner, packed);
  else
    gllm::pack<gllm::Float32>(static_cast<const float*>(weight), outputs, inner, packed);
}

// Rows ids [count] of packed weights -> rows [count][inner].
extern "C" void gllm_unpack_rows(int32_t half, const uint32_t* packed, int64_t inner, const int64_t* ids, int64_t count,
                                 void* rows) {
  if (half)
    gllm::unpack_rows<gllm::Bfloat16>(packed, inner, ids, count, static_cast<bf16*>(rows));
  else
    gllm::unpack_rows<gllm::Float32>(packed, inner, ids, count, static_cast<float*>(rows));
}

// x [rows][inner] -> y [rows][outputs], rows `x_stride` and `y_stride` elements apart. bias [outputs] and residual (laid
// out as y, and may be y) may be null.
extern "C" void gllm_linear(int32_t half, const void* x, int64_t x_stride, int64_t rows, const uint32_t* weight,
                            int64_t inner, int64_t outputs, const void* bias, const void* residual, void* y,
                            int64_t y_stride) {
  auto run = [&]<class Format>(Format) {
    using T = typename Format::type;
    gllm::Product<Format>{static_cast<const T*>(x), x_stride, rows, weight, inner, outputs,
                          static_cast<const T*>(bias), static_cast<const T*>(residual), static_cast<T*>(y), y_stride}
        .run();
  };
  if (rows == 0) return;
  half ? run(gllm::Bfloat16{}) : run(gllm::Float32{});
}
