#pragma once
/// Which folded spans a query zooms into: by a learned gate, or by the attention that their coarse entries would draw.
/// Source: SeKV (AmirAbaskohi/SeKV); the rules without training are ours. Differs: the heads that share keys share a
/// budget and never exceed it; if resident entries alone exceed it, nothing opens (the published code raises an error).

#include <limits>
#include <string>
#include <vector>

#include "kvkeep/memory/memory_attention.h"

namespace kvkeep {

class Fields;

struct ZoomOptions {
  enum class Rule : std::uint8_t {
    automatic,  ///< learned if there is a router, else mass
    learned,    ///< relevance above each head's threshold
    mass,       ///< estimated share of attention above `mass`
    coverage,   ///< the fewest spans, best first, that hold `coverage` of the attention that all spans draw; 1: all
  };
  enum class Heads : std::uint8_t {
    own,    ///< a head reads in full the spans that it asked for itself
    group,  ///< and those that the other heads of its group asked for
  };
  Rule rule = Rule::automatic;
  Heads heads = Heads::own;
  double mass = 0.02;
  double coverage = 0.9;
  double coverage_floor = 0.001;  ///< spans below this share stay folded in any case

  /// True if a router decides.
  [[nodiscard]] bool learned(bool has_router) const {
    return rule == Rule::learned || (rule == Rule::automatic && has_router);
  }

  /// Options that are not allowed, one sentence each with the field's name; empty if there are none.
  [[nodiscard]] std::vector<std::string> problems() const;
  void describe(Fields& f);
};

/// Entries of one KV head that may be in reach at once.
struct ZoomBudget {
  double entries = std::numeric_limits<double>::infinity();
  double resident = 0;    ///< taken even if nothing is zoomed: Segments::entries()
  bool per_head = false;  ///< each query head has this budget to itself, and a zoom takes L - 1 entries (published)
};

/// The learned gate: projections W, thresholds tau.
class Router {
 public:
  /// projections: f32, f16 or bf16 [Hq, d', D]; thresholds: [Hq]. Throws InvalidArgument for other shapes, and for
  /// numbers that are not finite.
  Router(const Tensor& projections, const Tensor& thresholds);

  /// f32 [Hq, spans]: 1 / |W kmean|, at most 1e8: all that routing needs besides the coarse keys. Throws
  /// InvalidArgument if heads or D differ. Cost: a matrix product.
  [[nodiscard]] Tensor norms(const SpanStore& spans) const;

  /// f32 [n, Hq, spans] in [0, 1]: sigmoid((W q) . (W kmean) * norm / sqrt(d') + log L). queries: [n, Hq, D] after
  /// RoPE. Cost: a matrix product with the coarse keys.
  [[nodiscard]] Tensor relevance(const SpanStore& spans, const Tensor& norms, const Tensor& queries) const;

  /// u8 [n, Hq, spans]: relevance above the head's threshold.
  [[nodiscard]] Tensor wanted(const Tensor& relevance) const;

  /// The same for one row, with `heads` query heads from `first_head` on: f32 [spans, heads].
  [[nodiscard]] std::vector<float> norms(const SpanRow& spans, std::int64_t first_head, std::int64_t heads) const;

  [[nodiscard]] std::int64_t query_heads() const { return thresholds_.size(0); }
  /// D.
  [[nodiscard]] std::int64_t key_dim() const { return projections_.size(2); }
  [[nodiscard]] float threshold(std::int64_t head) const { return thresholds_.data<float>()[head]; }
  /// f32 [d', D] of one head, and d'.
  [[nodiscard]] const float* projection(std::int64_t head) const {
    return projections_.data<float>() + head * projections_.stride(0);
  }
  [[nodiscard]] std::int64_t inner() const { return projections_.size(1); }

 private:
  Tensor projections_, thresholds_;  ///< f32 [Hq, d', D], [Hq]
};

/// f32 [n, Hq, spans]: share of attention that each coarse entry draws if nothing is zoomed. coarse: coarse_logits();
/// dense: attention over the dense rows.
[[nodiscard]] Tensor estimated_mass(const Tensor& coarse, const OpenAttention& dense);

/// u8 [n, Hq, spans]: spans that the rules of ZoomOptions without training ask for. Equal masses: the lower index
/// first. Throws InvalidArgument for Rule::learned; automatic means mass.
[[nodiscard]] Tensor wanted_by_mass(const Tensor& mass, const ZoomOptions& options);

/// u8 [n, Hq, spans]: the spans of `wanted` that are zoomed. Each KV head walks the spans that any of its heads wants,
/// by the highest relevance among those heads, then the lower index; one that does not fit is skipped. Throws
/// InvalidArgument for shapes that do not fit. Cost: a sort per query and KV head.
[[nodiscard]] Tensor within_budget(const Tensor& relevance, const Tensor& wanted, const SpanStore& spans,
                                   const ZoomBudget& budget, ZoomOptions::Heads heads);

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/zoom.h"  // and, after it, the bodies of this file
#endif
