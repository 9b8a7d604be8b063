// Attention of one task: some queries of a sequence, some heads, some tiles of keys. See attention_tasks.h.
#pragma once
#include <atomic>
#include <cstdlib>
#include <vector>

#include "attention.h"
#include "attention_few.h"
#include "attention_softmax.h"

namespace gllm {
namespace {

constexpr int MOST_WIDTH = 1024;  // of a head

int padded(int width) { return round_up(width, 2 * W); }

struct Prefix;

// Some query positions of one sequence, some key/value heads, and the tiles that these queries see.
struct Unit {
  int sequence, token, position, queries;
  int head, heads;
  int first_tile, end_tile;
  const Prefix* prefix = nullptr;  // whose result the tiles go on from
  int member = 0;                  // which of its sequences this is

  int tiles() const { return end_tile - first_tile; }
  int64_t work() const { return static_cast<int64_t>(tiles()) * queries * heads; }
};

// The results of a unit's tiles when several tasks make them; who makes the last merges them all.
struct Shared {
  Shared(const Unit& unit, int rows, int columns, int tasks)
      : first(unit.first_tile), rows(rows), columns(columns), missing(tasks),
        memory(unit.tiles() * Result::floats(rows, columns)) {}

  Result tile(int number) {
    return Result::in(&memory[(number - first) * Result::floats(rows, columns)], rows, columns);
  }
  bool last() { return missing.fetch_sub(1, std::memory_order_acq_rel) == 1; }

  int first, rows, columns;
  std::atomic<int> missing;
  std::vector<float> memory;
};

// Sequences with one query each that begin with the same blocks: the result of their common tiles, head by head.
struct Prefix {
  Prefix(int tiles, int group, int columns) : tiles(tiles), group(group), columns(columns) {}

  void allocate(int heads) { memory.resize(Result::floats(heads * rows(), columns)); }
  int rows() const { return static_cast<int>(tokens.size()) * group; }
  Result result(int head, int member) const {
    const int all = static_cast<int>(memory.size() / (columns + 2));
    return Result::in(const_cast<float*>(memory.data()), all, columns).from(head * rows() + member * group);
  }

  int tiles, group, columns;
  std::vector<int> sequences, tokens;
  std::vector<float> memory;
};

struct Task {
  Unit unit;
  int first_tile, end_tile;
  Shared* shared;             // null: the task makes all tiles of its unit
  Prefix* prefix = nullptr;   // not null: the unit's queries are those of its sequences, and its result theirs
};

template <class T>
class Scratch {  // grows and stays
 public:
  ~Scratch() { free(memory_); }
  T* get(int64_t count) {
    if (count > size_) {
      free(memory_);
      size_ = (count + 1023) / 1024 * 1024;
      memory_ = static_cast<T*>(aligned_alloc(64, size_ * sizeof(T)));
      if (!memory_) abort();
    }
    return memory_;
  }

 private:
  T* memory_ = nullptr;
  int64_t size_ = 0;
};

// The keys of a tile that a query at `position` sees.
Range seen_by(const Attention& call, int position, int tile) {
  const int base = tile * KEYS, first = call.window ? position + 1 - call.window : 0;
  return {std::clamp(first - base, 0, KEYS), std::clamp(position + 1 - base, 0, KEYS)};
}

// Where a tile's keys lie in the cache that some query of a unit sees; no other memory is read: 0 x NaN would be NaN.
template <class T>
struct Place {
  const T* cache;
  Range seen;
  int64_t offsets[KEYS];

  Place(const Attention& call, const Unit& unit, int tile) : cache(static_cast<const T*>(call.kv)) {
    seen = {seen_by(call, unit.position, tile).begin, seen_by(call, unit.position + unit.queries - 1, tile).end};
    const int first = tile * KEYS + seen.begin;
    const int64_t* block = call.tables + unit.sequence * call.table_stride + first / call.block_size;
    int inside = first % call.block_size;
    for (int key = seen.begin; key < seen.end; key++) {
      offsets[key] = *block * call.kv_block + inside * call.kv_key;
      if (++inside == call.block_size) inside = 0, block++;
    }
  }

  // The rows of one head; zeros up to a whole vector of keys.
  void find(const Attention& call, int head, Rows<T>& rows) const {
    alignas(64) static const T zeros[MOST_WIDTH] = {};
    rows.end = round_up(seen.end, W);
    for (const T** list : {rows.keys, rows.values}) {
      std::fill_n(list, seen.begin, zeros);
      std::fill(list + seen.end, list + rows.end, zeros);
    }
    const T* keys = cache + head * call.kv_head;
    for (int key = seen.begin; key < seen.end; key++) {
      rows.keys[key] = keys + offsets[key];
      rows.values[key] = keys + offsets[key] + call.kv_values;
    }
  }
};

// Computes tasks; holds the memory for it.
template <class M>
class Worker {
  using T = typename M::Stored;

 public:
  // `next` is what this thread may get next, to ask for its first keys.
  void run(const Attention& call, const Task& task, const Task& next) {
    together_ = task.prefix;
    begin(call, task.unit);
    if (!task.shared) start();
    Place<T> now(call, unit_, task.first_tile);
    now.find(call, unit_.head, found_[0]);
    int turn = 0;
    for (int tile = task.first_tile; tile < task.end_tile; tile++) {
      const bool last = tile + 1 == task.end_tile;
      const Unit& after = last ? next.unit : unit_;
      const Place<T> then(call, after, last ? next.first_tile : tile + 1);
      for (int head = 0; head < unit_.heads; head++, turn ^= 1) {
        if (head + 1 < unit_.heads) now.find(call, unit_.head + head + 1, found_[turn ^ 1]);
        else then.find(call, after.head, found_[turn ^ 1]);
        attend_tile(call, tile, head, found_[turn], task.shared, found_[turn ^ 1]);
      }
      now = then;
    }
    if (task.shared && !task.shared->last()) return;
    if (task.shared) merge_all(*task.shared);
    if (together_)
      together_->result(unit_.head, 0).copy(total_, rows_ * unit_.heads);
    else
      finish(call);
  }

 private:
  void begin(const Attention& call, const Unit& unit) {
    unit_ = unit;
    rows_ = unit.queries * call.group;
    columns_ = padded(call.width);
    elements_ = columns_ / M::PER_ELEMENT;
    keys_.get(elements_ * KEYS);
    values_.get(KEYS / M::PER_ELEMENT * columns_);
    block_ = Result::in(block_memory_.get(Result::floats(FEW_ROWS, columns_)), FEW_ROWS, columns_);
    const int rows = rows_ * unit.heads;
    total_ = Result::in(total_memory_.get(Result::floats(rows, columns_)), rows, columns_);
    uint32_t* to = queries_.get((rows + FEW_ROWS) * elements_);  // the last head's rows are read on to a full number
    std::fill_n(to + rows * elements_, FEW_ROWS * elements_, 0);
    for_rows(call, [&](int row, int64_t token, int64_t head) {
      const T* query = static_cast<const T*>(call.q) + token * call.q_token + head * call.q_head;
      for (int d = 0; d < call.width; d += W * M::PER_ELEMENT)
        write(to + row * elements_ + d / M::PER_ELEMENT, M::read(query + d, call.width - d));
    });
  }

  // Rows lie head by head, position by position, the group's query heads inside: work(row, token, query head) for each.
  template <class Work>
  void for_rows(const Attention& call, Work&& work) const {
    for (int head = 0, row = 0; head < unit_.heads; head++)
      for (int query = 0; query < unit_.queries; query++) {
        const int token = together_ ? together_->tokens[query] : unit_.token + query;
        for (int own = 0; own < call.group; own++, row++) work(row, token, (unit_.head + head) * call.group + own);
      }
  }

  int position_of(const Attention& call, int row) const { return unit_.position + row % rows_ / call.group; }

  void attend_tile(const Attention& call, int tile, int head, const Rows<T>& rows, Shared* shared, const Rows<T>& next) {
    if (rows_ <= FEW_ROWS) return attend_few(call, tile, head * rows_, rows, shared, next);
    pack_keys<M>(rows, call.width, keys_.get(0));
    pack_values<M>(rows, call.width, columns_, values_.get(0));
    const int bytes = call.width * sizeof(T), each = divide_up(next.end, divide_up(rows_, BLOCK_ROWS));
    int asked = 0;
    for (int row = head * rows_, end = row + rows_; row < end; row += BLOCK_ROWS) {
      for (const int last = std::min(next.end, asked + each); asked < last; asked++)
        ask(next.keys[asked], bytes), ask(next.values[asked], bytes);
      const int count = std::min(BLOCK_ROWS, end - row);
      const Result result = shared ? shared->tile(tile).from(row) : block_;
      attend_block(call, tile, row, count, result);
      if (!shared) total_.from(row).merge(result, count);
    }
  }

  void attend_block(const Attention& call, int tile, int first, int count, Result result) {
    const int end = seen_by(call, position_of(call, first + count - 1), tile).end;
    multiply<M>({queries_.get(0) + first * elements_, elements_, keys_.get(0), KEYS, scores_, KEYS,
                 divide_up(call.width, M::PER_ELEMENT)},
                count, divide_up(end, W));
    weigh(call, tile, first, count, divide_up(end, W), result);
    multiply<M>({reinterpret_cast<const uint32_t*>(weights_), KEYS / M::PER_ELEMENT, values_.get(0), columns_,
                 result.out, columns_, divide_up(end, M::PER_ELEMENT)},
                count, divide_up(call.width, W));
  }

  void weigh(const Attention& call, int tile, int first, int count, int vectors, Result result) {
    const Scoring scoring{call.scale, call.softcap};
    int position = position_of(call, first), own = first % call.group;
    for (int row = 0; row < count; row++) {
      const Range seen = seen_by(call, position, tile);
      const auto weigh_row = seen.begin == 0 && seen.end >= vectors * W ? softmax<M, true> : softmax<M, false>;
      weigh_row(scores_ + row * KEYS, seen, vectors, scoring, weights_ + row * KEYS, result.top[row], result.sum[row]);
      if (++own == call.group) own = 0, position++;
    }
  }

  // The rows of a head, at most FEW_ROWS.
  void attend_few(const Attention& call, int tile, int first, const Rows<T>& rows, Shared* shared, const Rows<T>& next) {
    if (rows_ <= 1) return attend_rows<1>(call, tile, first, rows, shared, next);
    if (rows_ <= 2) return attend_rows<2>(call, tile, first, rows, shared, next);
    if (rows_ <= 4) return attend_rows<4>(call, tile, first, rows, shared, next);
    if (rows_ <= 6) return attend_rows<6>(call, tile, first, rows, shared, next);
    if (rows_ <= 8) return attend_rows<8>(call, tile, first, rows, shared, next);
    attend_rows<FEW_ROWS>(call, tile, first, rows, shared, next);
  }

  // Computes ROWS rows, of which the head has some: one function for every number would take seconds to compile.
  template <int ROWS>
  void attend_rows(const Attention& call, int tile, int first, const Rows<T>& rows, Shared* shared, const Rows<T>& next) {
    constexpr int PARTS = std::max(1, (ROWS <= 2 ? 8 : ROWS <= 6 ? 4 : 2) / M::PER_ELEMENT);
    const Result result = shared ? shared->tile(tile).from(first) : block_;
    multiply_keys<M, ROWS>({rows, rows_, queries_.get(0) + first * elements_, elements_, call.width, scores_});
    weigh(call, tile, first, rows_, rows.end / W, result);
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(weights_);
    multiply_values<M, ROWS, PARTS>({rows, rows_, weights, call.width, result.out, columns_}, next);
    if (!shared) total_.from(first).merge(result, rows_);
  }

  // Nothing yet, or what the unit's prefix has.
  void start() {
    if (!unit_.prefix) return total_.clear(rows_ * unit_.heads);
    for (int head = 0; head < unit_.heads; head++)
      total_.from(head * rows_).copy(unit_.prefix->result(unit_.head + head, unit_.member), rows_);
  }

  void merge_all(Shared& shared) {
    start();
    for (int tile = unit_.first_tile; tile < unit_.end_tile; tile++) total_.merge(shared.tile(tile), shared.rows);
  }

  void finish(const Attention& call) const {
    for_rows(call, [&](int row, int64_t token, int64_t head) {
      T* out = static_cast<T*>(call.out) + (token * call.kv_heads * call.group + head) * call.width;
      const vf inverse = splat(1.0f / total_.sum[row]);
      map(out, call.width, [inverse](vf x) { return x * inverse; }, total_.from(row).out);
    });
  }

  Unit unit_;
  Prefix* together_;
  int rows_, columns_, elements_;  // rows of each head
  Rows<T> found_[2];
  Scratch<uint32_t> queries_, keys_, values_;
  Scratch<float> block_memory_, total_memory_;
  Result block_, total_;
  float scores_[FEW_ROWS * KEYS];
  typename M::Weight weights_[FEW_ROWS * KEYS] = {};
};

}  // namespace
}  // namespace gllm
