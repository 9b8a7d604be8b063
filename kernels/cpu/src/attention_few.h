// Products of few rows with one tile of keys: as `multiply` with what the packing functions make, sum by sum, but without
// its detour through memory, which would take longer than the products.
#pragma once
#include "attention_products.h"

namespace gllm {
namespace {

constexpr int KEYS_AHEAD_BYTES = 16384;  // how far ahead memory is asked for

inline void ask(const void* row, int bytes) {
  const char* at = static_cast<const char*>(row);
  for (int byte = 0; byte < bytes; byte += 128) __builtin_prefetch(at + byte), __builtin_prefetch(at + byte + 64);
}

// Asks for rows a short way ahead of those in use, then for the first of what comes after them, some at each of `steps`
// steps: the processor's own prefetching knows nothing of blocks, many requests at once would hold it up, and what is
// asked for too early has left the first cache when it is needed.
template <class T>
class Ahead {
 public:
  Ahead(const T* const* rows, int count, const T* const* then, int more, int width, int steps)
      : rows_(rows), then_(then), count_(count), bytes_(width * sizeof(T)),
        next_(std::min(count, KEYS_AHEAD_BYTES / bytes_)), end_(count + std::min(more, KEYS_AHEAD_BYTES / bytes_)),
        each_(divide_up(count, std::max(1, steps))) {}

  void step() {
    for (int left = std::min(each_, end_ - next_); left > 0; left--, next_++)
      ask(next_ < count_ ? rows_[next_] : then_[next_ - count_], bytes_);
  }

 private:
  const T *const *rows_, *const *then_;
  int count_, bytes_, next_, end_, each_;
};

constexpr int FEW_ROWS = 12;

// products [count][KEYS] = queries [ROWS][stride] x keys; what is computed beyond `count` rows is thrown away.
template <class T>
struct FewKeys {
  const Rows<T>& rows;
  int count;
  const uint32_t* queries;
  int stride, width;
  float* products;
};

template <class M, int ROWS, bool WHOLE>
inline void add_columns(const FewKeys<typename M::Stored>& p, int key, int d, vf (&sums)[ROWS]) {
  vu block[W];
  turn<M, WHOLE>(p.rows.keys + key, d, p.width - d, block);
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      sums[row] = M::add(sums[row], block[i], p.queries[row * p.stride + d / M::PER_ELEMENT + i]);
}

// The first values are asked for at the end.
template <class M, int ROWS>
void multiply_keys(const FewKeys<typename M::Stored>& p) {
  constexpr int STEP = W * M::PER_ELEMENT;
  const int end = p.rows.end;
  Ahead<typename M::Stored> ahead(p.rows.keys, end, p.rows.values, end, p.width, end / W * divide_up(p.width, STEP));
  for (int key = 0; key < end; key += W) {
    vf sums[ROWS] = {};
    int d = 0;
    for (; d + STEP <= p.width; d += STEP, ahead.step()) add_columns<M, ROWS, true>(p, key, d, sums);
    if (d < p.width) add_columns<M, ROWS, false>(p, key, d, sums), ahead.step();
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++)
      if (row < p.count) store(p.products + row * KEYS + key, sums[row]);
  }
}

// out [count][columns] = weights [ROWS][KEYS / PER_ELEMENT] x values.
template <class T>
struct FewValues {
  const Rows<T>& rows;
  int count;
  const uint32_t* weights;
  int width;
  float* out;
  int columns;
};

// PARTS vectors of elements from column d on. WHOLE: there are as many.
template <class M, int ROWS, int PARTS, bool WHOLE>
inline void multiply_some_values(const FewValues<typename M::Stored>& p, int d, Ahead<typename M::Stored>& ahead) {
  constexpr int N = M::PER_ELEMENT, STEP = W * N;
  vf sums[ROWS][PARTS * N] = {};
  for (int key = 0; key < p.rows.end; key += N, ahead.step()) {
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part++) {
      vu block[N];
      weave<M, WHOLE>(p.rows.values + key, d + part * STEP, p.width - d, block);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
        for (int i = 0; i < N; i++)
          sums[row][part * N + i] = M::add(sums[row][part * N + i], block[i], p.weights[row * (KEYS / N) + key / N]);
    }
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 16
    for (int v = 0; v < PARTS * N; v++)
      if (row < p.count) store(p.out + row * p.columns + d + v * W, sums[row][v]);
}

// The keys of `next` are asked for.
template <class M, int ROWS, int PARTS>
void multiply_values(const FewValues<typename M::Stored>& p, const Rows<typename M::Stored>& next) {
  constexpr int STEP = W * M::PER_ELEMENT;
  const int passes = p.rows.end / M::PER_ELEMENT * divide_up(p.width, PARTS * STEP);
  Ahead<typename M::Stored> ahead(p.rows.values, p.rows.end, next.keys, next.end, p.width, passes);
  int d = 0;
  for (; d + PARTS * STEP <= p.width; d += PARTS * STEP) multiply_some_values<M, ROWS, PARTS, true>(p, d, ahead);
  if constexpr (PARTS > 2)
    for (; d + 2 * STEP <= p.width; d += 2 * STEP) multiply_some_values<M, ROWS, 2, true>(p, d, ahead);
  for (; d < p.width; d += STEP) multiply_some_values<M, ROWS, 1, false>(p, d, ahead);
}

}  // namespace
}  // namespace gllm
