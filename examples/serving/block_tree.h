// SPDX-License-Identifier: Apache-2.0
#pragma once
/// What the engine of one_integer.h has of its own where other engines have theirs: a block manager, and a tree of
/// cached texts.

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "request.h"

namespace serving {

/// The engine's block manager: who holds which block. kvkeep asks it these three questions, and nothing else.
class Blocks final : public kvkeep::PageAllocator {
 public:
  explicit Blocks(std::int32_t count) : holders_(static_cast<std::size_t>(count)) {
    for (std::int32_t b = count; b-- > 0;) free_.push_back(b);
  }
  [[nodiscard]] std::int32_t references(std::int32_t block) const override { return holders_.at(at(block)); }
  [[nodiscard]] std::int32_t take() override {
    if (free_.empty()) return -1;
    const std::int32_t block = free_.back();
    free_.pop_back();
    ++holders_[at(block)];
    return block;
  }
  void give_back(std::int32_t block) override {
    KVKEEP_REQUIRE(holders_.at(at(block)) > 0, "give_back: nobody holds block ", block);
    if (--holders_[at(block)] == 0) free_.push_back(block);
  }
  void hold(std::int32_t block) { ++holders_.at(at(block)); }
  [[nodiscard]] std::int32_t free() const { return static_cast<std::int32_t>(free_.size()); }
  [[nodiscard]] std::int32_t count() const { return static_cast<std::int32_t>(holders_.size()); }

 private:
  static std::size_t at(std::int32_t block) { return static_cast<std::size_t>(block); }
  std::vector<std::int32_t> holders_, free_;
};

/// Blocks of texts that were computed, in a tree: a node is a block, named by its tokens and all before them. It holds
/// each of its blocks, so no event rewrites one.
class BlockTree {
 public:
  /// Bytes that Keeper::save() gave for a text that begins with the node's.
  using Window = std::shared_ptr<const std::vector<std::byte>>;
  struct Hit {
    std::int32_t tokens = 0;
    std::vector<std::int32_t> blocks = {};
    Window window = nullptr;
  };

  BlockTree(Blocks& blocks, std::int32_t size) : blocks_(blocks), size_(static_cast<std::size_t>(size)) {}
  ~BlockTree() {
    while (evict(true)) continue;
  }
  BlockTree(const BlockTree&) = delete;
  BlockTree& operator=(const BlockTree&) = delete;

  /// The longest text here that `tokens` begins with, in whole blocks; with a window if one is needed.
  [[nodiscard]] Hit match(std::span<const Token> tokens, bool needs_window);
  /// The blocks of `tokens`, whole ones. What is here already keeps its own. `window`, if there is one, is asked for if
  /// the last node has none.
  void insert(std::span<const Token> tokens, std::span<const std::int32_t> blocks,
              const std::function<Window()>& window);
  /// Gives back the leaf that was used longest ago and that nobody else holds; `any`: even if others do. False: there
  /// is none.
  bool evict(bool any = false);
  /// Calls look(tokens up to the end of the block, block) for each.
  void for_each(const std::function<void(std::span<const Token>, std::int32_t)>& look) const;

 private:
  struct Node {
    std::int32_t block = -1;
    Window window = nullptr;
    std::uint64_t used = 0;
    std::map<std::vector<Token>, std::unique_ptr<Node>> children = {};
  };
  Blocks& blocks_;
  std::size_t size_;
  Node root_ = {};
  std::uint64_t clock_ = 0;
};

inline BlockTree::Hit BlockTree::match(std::span<const Token> tokens, bool needs_window) {
  Hit hit, longest;
  Node* node = &root_;
  while (tokens.size() >= size_) {
    const auto found = node->children.find({tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(size_)});
    if (found == node->children.end()) break;
    node = found->second.get();
    node->used = ++clock_;
    tokens = tokens.subspan(size_);
    hit.tokens += static_cast<std::int32_t>(size_);
    hit.blocks.push_back(node->block);
    hit.window = node->window;
    if (!needs_window || hit.window != nullptr) longest = hit;
  }
  return longest;
}

inline void BlockTree::insert(std::span<const Token> tokens, std::span<const std::int32_t> blocks,
                              const std::function<Window()>& window) {
  Node* node = &root_;
  for (const std::int32_t block : blocks) {
    auto& child = node->children[{tokens.begin(), tokens.begin() + static_cast<std::ptrdiff_t>(size_)}];
    tokens = tokens.subspan(size_);
    if (child == nullptr) {
      child = std::make_unique<Node>();
      child->block = block;
      blocks_.hold(block);
    }
    node = child.get();
    node->used = ++clock_;
  }
  if (window && node != &root_ && node->window == nullptr) node->window = window();
}

inline bool BlockTree::evict(bool any) {
  Node* parent = nullptr;
  const std::vector<Token>* name = nullptr;
  const std::function<void(Node&)> look = [&](Node& node) {
    for (auto& [key, child] : node.children) {
      const bool leaf = child->children.empty() && (any || blocks_.references(child->block) == 1);
      if (leaf && (parent == nullptr || child->used < parent->children.at(*name)->used)) parent = &node, name = &key;
      look(*child);
    }
  };
  look(root_);
  if (parent == nullptr) return false;
  blocks_.give_back(parent->children.at(*name)->block);
  parent->children.erase(parent->children.find(*name));
  return true;
}

inline void BlockTree::for_each(const std::function<void(std::span<const Token>, std::int32_t)>& look) const {
  std::vector<Token> text;
  const std::function<void(const Node&)> down = [&](const Node& node) {
    for (const auto& [key, child] : node.children) {
      text.insert(text.end(), key.begin(), key.end());
      look(text, child->block);
      down(*child);
      text.resize(text.size() - key.size());
    }
  };
  down(root_);
}

}  // namespace serving
