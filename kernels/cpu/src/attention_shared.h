// Decodes of sequences that begin with the same blocks: the tiles in those blocks are read once for all of them (the
// first half of cascade attention, Ye et al. 2024; Hydragen, Juravsky et al. 2024).
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "attention_worker.h"
#include "pool.h"

namespace gllm {
namespace {

constexpr int MOST_TOGETHER = 96;   // sequences; the results of their heads stay in the second cache
constexpr int TASKS_A_THREAD = 2;  // of heads, so that no thread waits long for another

// Finds them, by the numbers of their blocks.
class Prefixes {
 public:
  explicit Prefixes(const Attention& call) : call_(call) {
    if (call.window) return;
    for (int sequence = 0, token = 0; sequence < call.sequences; token += call.counts[sequence++])
      if (call.counts[sequence] == 1 && call.lengths[sequence] > KEYS) decodes_.push_back({sequence, token});
    // In this order what two have in common is the least that neighbours between them have in common.
    std::sort(decodes_.begin(), decodes_.end(), [&](const Decode& one, const Decode& other) {
      const int64_t *first = blocks(one.sequence), *second = blocks(other.sequence);
      return std::lexicographical_compare(first, first + full_blocks(one.sequence), second,
                                          second + full_blocks(other.sequence));
    });
    for (size_t i = 1; i < decodes_.size(); i++)
      common_.push_back(common_tiles(decodes_[i - 1].sequence, decodes_[i].sequence));
  }

  // The groups of at least two, each with at least one tile, that save the most tiles.
  std::vector<std::unique_ptr<Prefix>> find() const {
    std::vector<std::unique_ptr<Prefix>> found;
    for (const Group& group : cut({0, static_cast<int>(decodes_.size())}).groups) {
      const int members = group.end - group.first, parts = parts_of(members);
      for (int part = 0; part < parts; part++) {
        const Group some{group.first + members * part / parts, group.first + members * (part + 1) / parts};
        found.push_back(make(some, least(group).tiles));
      }
    }
    return found;
  }

 private:
  struct Decode {
    int sequence, token;
  };
  struct Group {  // of decodes_
    int first, end;
  };
  struct Least {
    int tiles, second;  // that two neighbours have in common, and the second of them
  };
  struct Cut {
    int64_t saved;  // tiles that are not read again
    std::vector<Group> groups;
  };

  Least least(Group group) const {
    const auto first = common_.begin() + group.first;
    const auto found = std::min_element(first, common_.begin() + group.end - 1);
    return {*found, static_cast<int>(found - common_.begin()) + 1};
  }

  // All together, or apart where they have the least in common, whichever saves more.
  Cut cut(Group group) const {
    if (group.end - group.first < 2) return {0, {}};
    const Least here = least(group);
    const int64_t together = static_cast<int64_t>(group.end - group.first - 1) * here.tiles;
    Cut apart = cut({group.first, here.second}), rest = cut({here.second, group.end});
    apart.saved += rest.saved;
    if (together > 0 && together >= apart.saved) return {together, {group}};
    apart.groups.insert(apart.groups.end(), rest.groups.begin(), rest.groups.end());
    return apart;
  }

  // Few heads are too few tasks: then some sequences read the tiles apart from others.
  int parts_of(int members) const {
    const int wanted = divide_up(TASKS_A_THREAD * threads(), call_.kv_heads);
    return std::max(divide_up(members, MOST_TOGETHER), std::min(wanted, members / 2));
  }

  const int64_t* blocks(int sequence) const { return call_.tables + sequence * call_.table_stride; }
  // The last position is the sequence's own.
  int full_blocks(int sequence) const { return (call_.lengths[sequence] - 1) / call_.block_size; }

  int common_tiles(int one, int other) const {
    const int most = std::min(full_blocks(one), full_blocks(other));
    const int64_t* first = blocks(one);
    const int64_t same = std::mismatch(first, first + most, blocks(other)).first - first;
    return static_cast<int>(same * call_.block_size / KEYS);
  }

  std::unique_ptr<Prefix> make(Group group, int tiles) const {
    auto prefix = std::make_unique<Prefix>(tiles, call_.group, padded(call_.width));
    for (int index = group.first; index < group.end; index++) {
      prefix->sequences.push_back(decodes_[index].sequence);
      prefix->tokens.push_back(decodes_[index].token);
    }
    prefix->allocate(call_.kv_heads);
    return prefix;
  }

  const Attention& call_;
  std::vector<Decode> decodes_;
  std::vector<int> common_;  // tiles of each decode and the one before it
};

}  // namespace
}  // namespace gllm
