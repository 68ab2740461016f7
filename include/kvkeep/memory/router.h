#pragma once
/// Which folded spans a query zooms into: by a learned gate, or by the attention that their coarse entries would draw.
/// Source: SeKV (AmirAbaskohi/SeKV); the rules without training are ours. Differs: read_memory.h.

#include <cstdint>
#include <string>
#include <vector>

#include "kvkeep/memory/span_row.h"

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

/// The learned gate: projections W, thresholds tau. A head asks for the spans whose relevance, sigmoid((W q) . (W
/// kmean) /
/// (|W kmean| sqrt(d')) + log L), is above its tau.
class Router {
 public:
  /// projections: f32, f16 or bf16 [Hq, d', D]; thresholds: [Hq]. Throws InvalidArgument for other shapes, and for
  /// numbers that are not finite.
  Router(const Tensor& projections, const Tensor& thresholds);

  /// f32 [spans, heads]: 1 / |W kmean|, at most 1e8, of `heads` query heads from `first_head` on: all that routing
  /// needs besides the coarse keys. Spans of key_dim() numbers. Cost: heads * spans * d' * D products.
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

}  // namespace kvkeep

#ifdef KVKEEP_HEADER_ONLY
#include "kvkeep/memory/router-inl.h"
#endif
