// Decodes of sequences that begin with the same blocks: the tiles in those blocks are read once for all of them (the
// first half of cascade attention, Ye et al. 2024; Hydragen, Juravsky et al. 2024).
#pragma once
#include <algorithm>
#include <memory>
#include <vector>

#include "attention_worker.h"

namespace gllm {
namespace {

constexpr int MOST_TOGETHER = 96;  // sequences; the results of their heads stay in the second cache

// Finds them, by the numbers of their blocks.
class Prefixes {
 public:
  explicit Prefixes(const Attention& call) : call_(call) {
    if (call.window) return;
    for (int sequence = 0, token = 0; sequence < call.sequences; token += call.counts[sequence++])
      if (call.counts[sequence] == 1 && call.lengths[sequence] > KEYS) decodes_.push_back({sequence, token});
    // Sequences with long common beginnings come beside each other.
    std::sort(decodes_.begin(), decodes_.end(), [&](const Decode& one, const Decode& other) {
      const int64_t *first = blocks(one.sequence), *second = blocks(other.sequence);
      return std::lexicographical_compare(first, first + full_blocks(one.sequence), second,
                                          second + full_blocks(other.sequence));
    });
  }

  // The groups of at least two, each with at least one tile.
  std::vector<std::unique_ptr<Prefix>> find() const {
    std::vector<std::unique_ptr<Prefix>> found;
    for (size_t first = 0, end; first < decodes_.size(); first = end) {
      end = first + 1;
      int tiles = tiles_of(decodes_[first].sequence);
      // One more may leave fewer tiles in common: it joins unless that costs more than it saves.
      for (; end < decodes_.size() && end - first < MOST_TOGETHER; end++) {
        const int common = std::min(tiles, common_tiles(decodes_[first].sequence, decodes_[end].sequence));
        if (common == 0 || (end - first) * common < (end - first - 1) * tiles) break;
        tiles = common;
      }
      if (end - first > 1) found.push_back(make(first, end, tiles));
    }
    return found;
  }

 private:
  struct Decode {
    int sequence, token;
  };

  const int64_t* blocks(int sequence) const { return call_.tables + sequence * call_.table_stride; }
  // The last position is the sequence's own.
  int full_blocks(int sequence) const { return (call_.lengths[sequence] - 1) / call_.block_size; }
  int tiles_of(int sequence) const { return (call_.lengths[sequence] - 1) / KEYS; }

  int common_tiles(int one, int other) const {
    const int most = std::min(full_blocks(one), full_blocks(other));
    const int64_t* first = blocks(one);
    const int64_t same = std::mismatch(first, first + most, blocks(other)).first - first;
    return static_cast<int>(same * call_.block_size / KEYS);
  }

  std::unique_ptr<Prefix> make(size_t first, size_t end, int tiles) const {
    auto prefix = std::make_unique<Prefix>(tiles, call_.group, padded(call_.width));
    for (; first < end; first++) {
      prefix->sequences.push_back(decodes_[first].sequence);
      prefix->tokens.push_back(decodes_[first].token);
    }
    prefix->allocate(call_.kv_heads);
    return prefix;
  }

  const Attention& call_;
  std::vector<Decode> decodes_;
};

}  // namespace
}  // namespace gllm
