// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Pages of prompts that later requests may begin with, by hash as vLLM has it, or in a radix tree as SGLang does. Both
/// are holders of their pages (PagePool::retain), so no event ever rewrites one: it copies what stays of it.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "kvkeep/kvkeep.h"
#include "model.h"

namespace serving {

/// Keeper::save() of a sequence that is as long as a prefix: its query window, so that whoever begins with the prefix
/// scores as if it had run it.
using SavedWindow = std::shared_ptr<const std::vector<std::byte>>;

/// The longest prefix of a prompt that is cached.
struct Hit {
  std::int32_t tokens = 0;
  std::vector<std::int32_t> pages = {};
  SavedWindow window = nullptr;
};

/// Only whole pages of sequences that no event has cut may come in: after an event, a page of a sequence no longer
/// holds the tokens of its place.
class PrefixCache {
 public:
  /// needs_window: a hit is only as long as a prefix whose window was saved (Keeper::queries_read() is not 0).
  PrefixCache(kvkeep::PagePool& pool, bool needs_window) : pool_(pool), needs_window_(needs_window) {}
  virtual ~PrefixCache() = default;
  PrefixCache(const PrefixCache&) = delete;
  PrefixCache& operator=(const PrefixCache&) = delete;

  /// The longest whole pages of `prompt` that are here, at most `most` tokens. They become the newest.
  [[nodiscard]] virtual Hit match(std::span<const Token> prompt, std::int32_t most) = 0;

  /// tokens: whole pages; pages: those that hold them; window: as long as `tokens`, null if none is needed. What is
  /// here already stays, with its own pages.
  virtual void insert(std::span<const Token> tokens, std::span<const std::int32_t> pages, SavedWindow window) = 0;

  /// Gives back the page that was used longest ago among those that nobody else holds. False: there is none.
  virtual bool evict() = 0;

  /// Calls f(tokens up to the end of the page, page) for every page here.
  using Look = std::function<void(std::span<const Token>, std::int32_t page)>;
  virtual void for_each(const Look& f) const = 0;

  /// Pages that evict() could give back, one after the other.
  [[nodiscard]] virtual std::int32_t evictable() const = 0;

 protected:
  [[nodiscard]] std::size_t page_size() const { return static_cast<std::size_t>(pool_.page_size()); }
  [[nodiscard]] kvkeep::PagePool& pool() { return pool_; }
  [[nodiscard]] bool needs_window() const { return needs_window_; }
  [[nodiscard]] bool only_here(std::int32_t page) const { return pool_.references(page) == 1; }

 private:
  kvkeep::PagePool& pool_;
  bool needs_window_;
};

/// One entry per page, by the hash of its tokens and all before them.
class HashCache final : public PrefixCache {
 public:
  using PrefixCache::PrefixCache;
  ~HashCache() override {
    for (const auto& [hash, entry] : entries_) pool().give_back(entry.page);
  }

  [[nodiscard]] Hit match(std::span<const Token> prompt, std::int32_t most) override {
    Hit hit, longest;
    std::uint64_t hash = 0;
    std::vector<Entry*> path;
    for (std::size_t end = page_size(); end <= std::min(prompt.size(), static_cast<std::size_t>(most));
         end += page_size()) {
      hash = hash_of(hash, prompt.subspan(end - page_size(), page_size()));
      const auto found = entries_.find(hash);
      if (found == entries_.end() || !std::ranges::equal(found->second.tokens, prompt.first(end))) break;
      path.push_back(&found->second);
      hit.tokens = static_cast<std::int32_t>(end);
      hit.pages.push_back(found->second.page);
      hit.window = found->second.window;
      if (hit.window != nullptr || !needs_window()) longest = hit;
    }
    touch(path);
    return longest;
  }

  void insert(std::span<const Token> tokens, std::span<const std::int32_t> pages, SavedWindow window) override {
    std::uint64_t hash = 0;
    std::vector<Entry*> path;
    for (std::size_t p = 0; p < pages.size(); ++p) {
      hash = hash_of(hash, tokens.subspan(p * page_size(), page_size()));
      const auto [found, is_new] = entries_.try_emplace(hash);
      if (is_new) {
        const auto upto = tokens.first((p + 1) * page_size());
        found->second = {.tokens = {upto.begin(), upto.end()}, .page = pages[p]};
        pool().retain(pages[p]);
      } else if (!std::ranges::equal(found->second.tokens, tokens.first((p + 1) * page_size()))) {
        break;  // another text with this hash: it stays
      }
      if (p + 1 == pages.size() && found->second.window == nullptr) found->second.window = window;
      path.push_back(&found->second);
    }
    touch(path);
  }

  bool evict() override {
    auto oldest = entries_.end();
    for (auto one = entries_.begin(); one != entries_.end(); ++one)
      if (only_here(one->second.page) && (oldest == entries_.end() || one->second.used < oldest->second.used))
        oldest = one;
    if (oldest == entries_.end()) return false;
    pool().give_back(oldest->second.page);
    entries_.erase(oldest);
    return true;
  }

  void for_each(const Look& f) const override {
    for (const auto& [hash, entry] : entries_) f(entry.tokens, entry.page);
  }

  [[nodiscard]] std::int32_t evictable() const override {
    std::int32_t pages = 0;
    for (const auto& [hash, entry] : entries_) pages += only_here(entry.page) ? 1 : 0;
    return pages;
  }

 private:
  struct Entry {
    std::vector<Token> tokens = {};
    std::int32_t page = -1;
    SavedWindow window = nullptr;
    std::uint64_t used = 0;
  };
  static std::uint64_t hash_of(std::uint64_t hash, std::span<const Token> tokens) {
    for (const Token token : tokens) hash = chained(hash, token);
    return hash;
  }
  /// The last pages are the oldest, so that what is left is always reached from its beginning.
  void touch(std::span<Entry* const> path) {
    for (auto entry = path.rbegin(); entry != path.rend(); ++entry) (*entry)->used = ++clock_;
  }

  std::unordered_map<std::uint64_t, Entry> entries_;
  std::uint64_t clock_ = 0;
};

/// A tree whose edges are runs of whole pages; nodes split where texts part.
class RadixCache final : public PrefixCache {
 public:
  using PrefixCache::PrefixCache;
  ~RadixCache() override {
    for_each([this](std::span<const Token>, std::int32_t page) { pool().give_back(page); });
  }

  [[nodiscard]] Hit match(std::span<const Token> prompt, std::int32_t most) override {
    Hit hit, longest;
    prompt = prompt.first(std::min(prompt.size(), static_cast<std::size_t>(most)));
    for (Node* node = &root_; node != nullptr;) {
      node->used = ++clock_;
      const auto rest = prompt.subspan(static_cast<std::size_t>(hit.tokens));
      const auto child = child_of(*node, rest);
      if (!child) break;
      const std::size_t pages = common_pages(**child, rest);
      node = pages == (*child)->pages.size() ? *child : nullptr;
      for (std::size_t p = 0; p < pages; ++p) {
        hit.pages.push_back((*child)->pages[p]);
        hit.tokens += static_cast<std::int32_t>(page_size());
        hit.window = (*child)->windows[p];
        if (hit.window != nullptr || !needs_window()) longest = hit;
      }
      (*child)->used = ++clock_;
    }
    return longest;
  }

  void insert(std::span<const Token> tokens, std::span<const std::int32_t> pages, SavedWindow window) override {
    Node* node = &root_;
    std::size_t done = 0;  // pages
    while (done < pages.size()) {
      node->used = ++clock_;
      const auto rest = tokens.subspan(done * page_size());
      const auto child = child_of(*node, rest);
      if (!child) {
        auto leaf = std::make_unique<Node>();
        leaf->tokens.assign(rest.begin(), rest.end());
        leaf->pages.assign(pages.begin() + static_cast<std::ptrdiff_t>(done), pages.end());
        leaf->windows.resize(leaf->pages.size());
        for (const std::int32_t page : leaf->pages) pool().retain(page);
        leaf->windows.back() = std::move(window);
        leaf->used = ++clock_;
        node->children.push_back(std::move(leaf));
        return;
      }
      const std::size_t same = common_pages(**child, rest);
      // Who ran the same text beside another has pages of its own: what follows them would keep the others here.
      if (!std::ranges::equal(std::span((*child)->pages).first(same), pages.subspan(done, same))) return;
      if (same < (*child)->pages.size()) split(**child, same);
      node = *child;
      done += same;
    }
    node->used = ++clock_;
    if (!node->windows.empty() && node->windows.back() == nullptr) node->windows.back() = std::move(window);
  }

  bool evict() override {
    Node* parent = nullptr;
    std::size_t place = 0;
    find_oldest(root_, parent, place);
    if (parent == nullptr) return false;
    Node& leaf = *parent->children[place];
    pool().give_back(leaf.pages.back());
    leaf.pages.pop_back();
    leaf.windows.pop_back();
    leaf.tokens.resize(leaf.pages.size() * page_size());
    if (leaf.pages.empty()) parent->children.erase(parent->children.begin() + static_cast<std::ptrdiff_t>(place));
    return true;
  }

  void for_each(const Look& f) const override {
    std::vector<Token> text;
    look(root_, text, f);
  }

  [[nodiscard]] std::int32_t evictable() const override {
    std::int32_t pages = 0;
    for (const auto& child : root_.children) pages += evictable(*child).first;
    return pages;
  }

 private:
  struct Node {
    std::vector<Token> tokens = {};         ///< of its pages
    std::vector<std::int32_t> pages = {};   ///< at least one, but for the root
    std::vector<SavedWindow> windows = {};  ///< [pages] at the end of each; null: none was saved there
    std::vector<std::unique_ptr<Node>> children = {};
    std::uint64_t used = 0;
  };

  /// The child whose first page `rest` begins with.
  [[nodiscard]] std::optional<Node*> child_of(const Node& node, std::span<const Token> rest) const {
    if (rest.size() < page_size()) return {};
    for (const auto& child : node.children)
      if (std::ranges::equal(std::span(child->tokens).first(page_size()), rest.first(page_size()))) return child.get();
    return {};
  }

  [[nodiscard]] std::size_t common_pages(const Node& node, std::span<const Token> rest) const {
    std::size_t pages = 0;
    for (std::size_t end = page_size(); end <= std::min(node.tokens.size(), rest.size()); end += page_size(), ++pages)
      if (!std::ranges::equal(std::span(node.tokens).subspan(end - page_size(), page_size()),
                              rest.subspan(end - page_size(), page_size())))
        break;
    return pages;
  }

  /// The node keeps its first pages, a child gets the others.
  void split(Node& node, std::size_t pages) {
    auto rest = std::make_unique<Node>();
    const auto cut = static_cast<std::ptrdiff_t>(pages), token = static_cast<std::ptrdiff_t>(pages * page_size());
    rest->tokens.assign(node.tokens.begin() + token, node.tokens.end());
    rest->pages.assign(node.pages.begin() + cut, node.pages.end());
    rest->windows.assign(node.windows.begin() + cut, node.windows.end());
    rest->children = std::exchange(node.children, {});
    rest->used = node.used;
    node.tokens.resize(pages * page_size());
    node.pages.resize(pages);
    node.windows.resize(pages);
    node.children.push_back(std::move(rest));
  }

  /// From the ends of branches on: how many pages, and whether these are all of the branch. A sequence that was cut may
  /// still hold a page of the middle.
  [[nodiscard]] std::pair<std::int32_t, bool> evictable(const Node& node) const {
    std::int32_t pages = 0;
    bool all = true;
    for (const auto& child : node.children) {
      const auto [of_child, whole] = evictable(*child);
      pages += of_child, all = all && whole;
    }
    for (auto page = node.pages.rbegin(); all && page != node.pages.rend(); ++page)
      only_here(*page) ? void(++pages) : void(all = false);
    return {pages, all};
  }

  void find_oldest(Node& node, Node*& parent, std::size_t& place) {
    for (std::size_t c = 0; c < node.children.size(); ++c) {
      Node& child = *node.children[c];
      const bool free = child.children.empty() && only_here(child.pages.back());
      if (free && (parent == nullptr || child.used < parent->children[place]->used)) parent = &node, place = c;
      find_oldest(child, parent, place);
    }
  }

  void look(const Node& node, std::vector<Token>& text, const Look& f) const {
    for (const auto& child : node.children) {
      for (std::size_t p = 0; p < child->pages.size(); ++p) {
        const auto own = std::span(child->tokens).subspan(p * page_size(), page_size());
        text.insert(text.end(), own.begin(), own.end());
        f(text, child->pages[p]);
      }
      look(*child, text, f);
      text.resize(text.size() - child->tokens.size());
    }
  }

  Node root_;
  std::uint64_t clock_ = 0;
};

}  // namespace serving
