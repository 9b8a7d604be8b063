// Causal attention of a ragged batch over the paged cache, one entry for decodes, chunks and whole prefills.
//
// Keys are taken in tiles at fixed absolute positions; each tile's result is made on its own, and a row merges them one
// by one in the order of their positions (flash-decoding's split, Dao et al. 2023). Which task makes which tiles is
// free.
#pragma once
#include <memory>
#include <vector>

#include "attention_shared.h"
#include "attention_worker.h"
#include "pool.h"

namespace gllm {
namespace {

constexpr int UNIT_ROWS = 192;       // query rows of a head: what is packed serves that many
constexpr int SPLIT_ROWS = 32;       // with more, heads are apart and keys are not split: tiles' results are large
constexpr int TASKS_PER_THREAD = 4;  // as many at least, so that no thread waits long for another

// The tasks of a call, and what they share. Those of prefixes come before all others.
class Tasks {
 public:
  explicit Tasks(const Attention& call) : call_(call), prefixes_(Prefixes(call).find()), starts_(call.sequences) {
    for (const auto& prefix : prefixes_) add_prefix(*prefix);
    const std::vector<Unit> units = cut_queries();
    int64_t work = 0;
    for (const Unit& unit : units) work += unit.work();
    for (const Unit& unit : units) cut_keys(unit, std::max<int64_t>(1, work / (TASKS_PER_THREAD * threads())));
  }

  std::vector<Task> first, tasks;

 private:
  // Where a sequence's tiles begin that it has for itself.
  struct Start {
    const Prefix* prefix;
    int member;
  };

  // A task for each head: a cut between tiles would leave results of all of them to be merged.
  void add_prefix(Prefix& prefix) {
    const int members = static_cast<int>(prefix.sequences.size());
    for (int member = 0; member < members; member++) starts_[prefix.sequences[member]] = {&prefix, member};
    for (int head = 0; head < call_.kv_heads; head++) {
      const Unit unit{prefix.sequences[0], 0, prefix.tiles * KEYS - 1, members, head, 1, 0, prefix.tiles};
      first.push_back({unit, 0, prefix.tiles, nullptr, &prefix});
    }
  }

  int rows_of(const Unit& unit) const { return unit.queries * call_.group; }

  // The last queries first: theirs are the longest tasks.
  std::vector<Unit> cut_queries() const {
    std::vector<Unit> units;
    const int most = std::max(1, UNIT_ROWS / call_.group);
    for (int sequence = 0, token = 0; sequence < call_.sequences; token += call_.counts[sequence++]) {
      const int count = call_.counts[sequence], start = call_.lengths[sequence] - count;
      for (int first = (count - 1) / most * most; first >= 0; first -= most) {
        Unit unit{sequence, token + first, start + first, std::min(most, count - first), 0, call_.kv_heads, 0, 0};
        unit.first_tile = call_.window ? std::max(0, unit.position + 1 - call_.window) / KEYS : 0;
        if (const Start& start = starts_[sequence]; start.prefix)
          unit.first_tile = start.prefix->tiles, unit.prefix = start.prefix, unit.member = start.member;
        unit.end_tile = divide_up(unit.position + unit.queries, KEYS);
        units.push_back(unit);
      }
    }
    return units;
  }

  // Cut a unit into tasks of about `share` of work: along the keys where results are small, else between heads.
  void cut_keys(const Unit& unit, int64_t share) {
    const int wanted = static_cast<int>(std::min<int64_t>(1 << 20, (unit.work() + share - 1) / share));
    const bool many = rows_of(unit) > SPLIT_ROWS;
    const int parts = many ? 1 : std::min(wanted, unit.tiles());
    const int between = many ? call_.kv_heads : std::min(divide_up(wanted, parts), call_.kv_heads);
    for (int part = 0; part < between; part++) {
      Unit some = unit;
      some.head = unit.heads * part / between;
      some.heads = unit.heads * (part + 1) / between - some.head;
      add(some, parts);
    }
  }

  void add(const Unit& unit, int parts) {
    Shared* shared = nullptr;
    if (parts > 1) {
      shared_.push_back(std::make_unique<Shared>(unit, rows_of(unit) * unit.heads, padded(call_.width), parts));
      shared = shared_.back().get();
    }
    auto cut = [&](int part) { return unit.first_tile + unit.tiles() * part / parts; };
    for (int part = 0; part < parts; part++) tasks.push_back({unit, cut(part), cut(part + 1), shared, nullptr});
  }

  const Attention& call_;
  const std::vector<std::unique_ptr<Prefix>> prefixes_;
  std::vector<Start> starts_;  // by sequence
  std::vector<std::unique_ptr<Shared>> shared_;
};

template <class M>
void attention(const Attention& call) {
  const Tasks cut(call);
  for (const std::vector<Task>* tasks : {&cut.first, &cut.tasks}) {
    const int64_t count = tasks->size();
    parallel_for(count, [&](int64_t number) {
      static thread_local std::unique_ptr<Worker<M>> worker = std::make_unique<Worker<M>>();
      worker->run(call, (*tasks)[number], (*tasks)[std::min(number + threads(), count - 1)]);
    });
  }
}

}  // namespace
}  // namespace gllm
