// y = x W^T (+ bias): how the work is cut, whatever the number format.
//
// Rows are packed for the time of a call, in blocks of rows that are computed at once. A few blocks take a panel's weights
// piece by piece, each piece in the first cache for all of them while the next one is fetched; many blocks take the
// panel as a whole, one block after the other, from the second cache.
#pragma once
#include <cstdlib>

#include "linear.h"
#include "pool.h"

namespace gllm {

constexpr int64_t TILE_ROWS = 56;       // rows of a tile at most
constexpr int64_t FEW_BLOCKS = 3;       // at most so many are bound by memory: they share a panel piece by piece
constexpr int64_t PIECE_BYTES = 8192;   // weights of a piece: it and the next one stay in the first cache
constexpr int64_t PANEL_AHEAD_BYTES = 8192;   // how far ahead memory is asked for when there is one block of rows

// Memory of the calling thread that grows and stays.
inline char* scratch(int64_t bytes) {
  static thread_local char* memory = nullptr;
  static thread_local int64_t size = 0;
  if (bytes > size) {
    free(memory);
    size = divide_up(bytes, 4096) * 4096;
    memory = static_cast<char*>(aligned_alloc(64, size));
    if (!memory) abort();
  }
  return memory;
}

// The arguments of a product. x [rows][inner] and y [rows][outputs] have rows `x_stride` and `y_stride` elements apart;
// bias [outputs] may be null. `widened`: y is float32, of the results as T has them.
template <class T>
struct Operands {
  const T* x;
  int64_t x_stride, rows;
  const char* weight;
  int64_t inner, outputs;
  const T* bias;
  void* y;
  int64_t y_stride;
  bool widened;
};

template <class Format, class T>
struct Product : Operands<T> {
  using Base = Operands<T>;
  using Base::bias, Base::inner, Base::outputs, Base::rows, Base::widened, Base::weight, Base::x, Base::x_stride;
  using Base::y, Base::y_stride;

  static constexpr int64_t ROWS = Format::ROWS, TILE_BLOCKS = TILE_ROWS / ROWS;
  static constexpr int64_t PIECE_STEPS = PIECE_BYTES / Format::WEIGHT_BYTES;
  static constexpr int64_t AHEAD_STEPS = PANEL_AHEAD_BYTES / Format::WEIGHT_BYTES;

  explicit Product(const Base& operands) : Base(operands) {}

  int64_t steps = divide_up(inner, Format::ELEMENTS);
  int64_t height = divide_up(rows, divide_up(rows, ROWS));
  int64_t blocks = divide_up(rows, height);
  int64_t block_bytes = steps * height * Format::ROW_BYTES;
  int64_t tiles_down = divide_up(blocks, TILE_BLOCKS);
  char* packed = scratch(blocks * block_bytes);

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
    const T* first = x + block * height * x_stride;
    Format::pack_block(first, x_stride, rows_of(block), inner, packed + block * block_bytes, height);
  }

  // All outputs of a panel for the blocks of a tile. Where they will go is asked for at once: their lines lie far apart.
  void compute(int64_t panel, int64_t first_block) {
    alignas(64) float sums[TILE_BLOCKS * ROWS * COLUMNS];
    const int64_t end = first_block + TILE_BLOCKS < blocks ? first_block + TILE_BLOCKS : blocks;
    const int64_t count = end - first_block, row = first_block * height, end_row = end == blocks ? rows : end * height;
    for (int64_t r = row; r < end_row; r++) ask_for_outputs(r * y_stride + panel * COLUMNS);
    const char* w = weight + panel * steps * Format::WEIGHT_BYTES;
    for (int64_t step = 0, some; step < steps; step += some, w += some * Format::WEIGHT_BYTES) {
      some = steps_of_piece(step, count);
      Piece piece{w, nullptr, height, some, nullptr, Format::WEIGHT_BYTES / count};
      const char* next = after(panel, step + some, count, w);
      for (int64_t block = 0; block < count; block++) {
        piece.x = packed + (first_block + block) * block_bytes + step * height * Format::ROW_BYTES;
        piece.ahead = next + block * piece.steps * piece.fetch;
        add_steps<Format>(rows_of(first_block + block), sums + block * height * COLUMNS, piece, step == 0);
      }
    }
    finish(panel * COLUMNS, row, end_row - row, sums);
  }

  // One block goes through a panel at once, but for its end, where the next panel is asked for.
  int64_t steps_of_piece(int64_t step, int64_t count) const {
    if (count > FEW_BLOCKS) return steps;
    const int64_t left = steps - step;
    if (count == 1) return left > AHEAD_STEPS ? left - AHEAD_STEPS : left;
    return left < PIECE_STEPS ? left : PIECE_STEPS;
  }

  // What is asked for while the piece at `w` is used, which ends at `step`. Panels go to the threads by turns.
  const char* after(int64_t panel, int64_t step, int64_t count, const char* w) const {
    if (count > FEW_BLOCKS) return w + steps * Format::WEIGHT_BYTES;
    if (step == steps) return weight + (panel + threads()) * steps * Format::WEIGHT_BYTES;
    return w + (count == 1 ? AHEAD_STEPS : PIECE_STEPS) * Format::WEIGHT_BYTES;
  }

  void finish(int64_t column, int64_t first_row, int64_t count, const float* sums) {
    const int64_t width = outputs - column < COLUMNS ? outputs - column : COLUMNS;
    for (int64_t row = 0; row < count; row++)
      for (int64_t at = 0; at < width; at += W)
        finish_vector(sums + row * COLUMNS + at, (first_row + row) * y_stride, column + at, width - at);
  }

  void finish_vector(const float* sums, int64_t row, int64_t column, int64_t left) {
    vf sum = load(sums);
    if (bias) sum += left < W ? load_part(bias + column, left) : load(bias + column);
    widened ? put(static_cast<float*>(y) + row + column, rounded<T>(sum), left)
            : put(static_cast<T*>(y) + row + column, sum, left);
  }

  template <class To>
  static void put(To* to, vf values, int64_t left) {
    left < W ? store_part(to, values, left) : store(to, values);
  }

  void ask_for_outputs(int64_t at) const {
    __builtin_prefetch(static_cast<char*>(y) + at * (widened ? sizeof(float) : sizeof(T)), 1);
  }
};

}  // namespace gllm
