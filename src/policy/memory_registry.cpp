#include "memory_registry.h"

namespace kvkeep {
namespace {

constexpr double kAnyAlpha = 1e9, kAnyWeight = 1e9;

/// The published code: no sinks, window or longest span, uncentred rows, gates that weigh, and never raw rows.
SekvOptions defaults_of(Variant variant) {
  SekvOptions o;
  o.variant = variant;
  if (variant == Variant::strict) return o;
  o.segmenter.sink = o.segmenter.recent = o.segmenter.max_span = 0;
  o.memory.factors.rank = FactorOptions::Rank::gates;
  o.memory.factors.centred = FactorOptions::Centred::never;
  o.memory.factors.soft_gates = true;
  o.memory.factors.raw = false;
  o.training.published = true;
  return o;
}

void describe_spans(Fields& f, SegmenterOptions& o) {
  f.real("alpha", o.alpha, -kAnyAlpha, false, kAnyAlpha, false,
         "a token is an anchor if its surprisal is above mean + alpha * deviation");
  f.integer("min_span", o.min_span, 1, INT32_MAX, "shorter runs between anchors stay as they are");
  f.integer("max_span", o.max_span, 1, INT32_MAX, "longer runs are cut into equal pieces", {},
            o.max_span == 0 ? "none" : nullptr);
}

void describe_factors(Fields& f, FactorOptions& o) {
  using Rank = FactorOptions::Rank;
  using Centred = FactorOptions::Centred;
  f.integer("max_rank", o.max_rank, 1, 4096, "most components that are kept of a span's keys, and of its values");
  f.choice("rank", o.rank, {{"energy", Rank::energy}, {"gates", Rank::gates}, {"max", Rank::max}},
           "how many components: by what is left out, by learned gates, or up to max_rank");
  f.real("energy", o.energy, 0, false, 1, false,
         "with rank=energy: what is left out is at most energy^2 of the sum of squares");
  f.real("gate_keep", o.gate_keep, 0, false, 1, false, "with rank=gates: gates above it keep their component");
  f.choice("centred", o.centred, {{"auto", Centred::automatic}, {"always", Centred::always}, {"never", Centred::never}},
           "factors of rows minus their coarse entry: if that leaves less out (never with gates), always, or never");
  f.choice("store", o.store, {{"f32", Dtype::f32}, {"bf16", Dtype::bf16}, {"f16", Dtype::f16}},
           "dtype of coarse entries and factors");
}

void describe_zoom(Fields& f, ZoomOptions& o) {
  using Rule = ZoomOptions::Rule;
  using Heads = ZoomOptions::Heads;
  f.choice("zoom", o.rule,
           {{"auto", Rule::automatic}, {"learned", Rule::learned}, {"mass", Rule::mass}, {"coverage", Rule::coverage}},
           "which spans a query opens: by a trained router, by estimated share of attention, or the fewest that hold "
           "`coverage` of what spans draw; auto: learned if there is a router, else mass");
  f.real("mass", o.mass, 0, false, 1, false, "with zoom=mass: share of attention above which a span opens");
  f.real("coverage", o.coverage, 0, false, 1, false,
         "with zoom=coverage: opened spans hold this share of what all spans draw");
  f.real("coverage_floor", o.coverage_floor, 0, false, 1, false,
         "with zoom=coverage: spans below this share of attention stay folded");
  f.choice("zoom_heads", o.heads, {{"own", Heads::own}, {"group", Heads::group}},
           "a query head reads in full the spans it asked for, or those that any head of its group asked for");
}

void describe_stores(Fields& f, MemoryOptions& o) {
  const auto bytes = [&f](const char* name, std::int64_t& cap, const char* what) {
    std::int64_t given = 0;
    if (f.integer(name, given, 0, INT64_MAX, what, {}, "-")) cap = given;
  };
  if (const std::filesystem::path file = f.optional_file("router", "trained router and gates (kvkeep_train_router)");
      !file.empty())
    o.routing = std::make_shared<Routing>(Routing::read(file));
  bytes("near_bytes", o.near.bytes, "factors of opened spans that stay near; left out: all");
  bytes("host_bytes", o.far.host_bytes, "factors in host memory, an exact cap; left out: no limit");
  o.far.file =
      f.optional_file("file", "a new file for factors that do not fit into host memory; it is removed with the run");
  bytes("file_bytes", o.far.file_bytes, "factors in the file; left out: no limit");
  f.choice("damage", o.damage, {{"refuse", Damage::refuse}, {"coarse", Damage::coarse}},
           "if a span's factors can no longer be read: an error that names it, or its coarse entry is read instead");
}

void describe_training(Fields& f, TrainingOptions& o) {
  f.real("zoom_weight", o.zoom_weight, 0, false, kAnyWeight, false,
         "weight of the loss for spans that should be zoomed and are not, or the reverse");
  f.real("recon_weight", o.recon_weight, 0, false, kAnyWeight, false, "weight of the loss for what gates leave out");
  f.real("budget_weight", o.budget_weight, 0, false, kAnyWeight, false,
         "weight of the loss for zoomed spans and kept components, as annealed at this step");
  f.real("rank_weight", o.rank_weight, 0, false, kAnyWeight, false, "weight of a kept component against a zoomed span");
  f.real("positive_weight", o.positive_weight, 0, false, kAnyWeight, false, "weight of spans that should be zoomed");
  f.real("coverage", o.coverage, 0, false, 1, false,
         "share of the teacher's span attention that spans to zoom should hold");
  f.real("temperature", o.temperature, 0, true, kAnyWeight, false,
         "temperature of the sigmoid that replaces a zoom in gradients");
}

}  // namespace

void describe_memory(Fields& f, MemoryOptions& o) {
  describe_factors(f, o.factors);
  describe_zoom(f, o.zoom);
  f.flag(
      "sketch", o.sketch,
      "without a learned router: signs of every folded key stay near, and shares of attention are estimated from them "
      "(off in traces)");
  describe_stores(f, o);
}

SekvOptions describe_sekv(Fields& f) {
  std::int32_t budget = 0;
  f.integer("budget", budget, 1, INT32_MAX,
            "entries of one KV head that may be in reach at once: dense tokens, coarse entries, zoomed factors by "
            "size; left out: no limit",
            {}, "-");
  double share = 0;
  f.real("budget_share", share, 0, true, 1, false, "instead of `budget`: that share of the tokens seen", {}, "-");
  Variant variant = Variant::strict;
  f.choice("variant", variant, {{"strict", Variant::strict}, {"official", Variant::official}},
           "our corrected form, or the published rules and defaults");
  SekvOptions o = defaults_of(variant);
  o.budget = budget;
  o.budget_share = share;
  f.integer("interval", o.interval, 1, INT32_MAX, "tokens that leave the local window together while decoding");
  f.integer("sink", o.segmenter.sink, 0, INT32_MAX, "oldest tokens that are always anchors");
  f.integer("recent", o.segmenter.recent, 0, INT32_MAX, "newest tokens that stay as they are (local window)");
  f.enter("memory");
  describe_spans(f, o.segmenter);
  describe_memory(f, o.memory);
  f.real("zoom_share", o.zoom_share, 0, false, 1, false,
         "share of the budget that is kept free for zooming when anchors are chosen");
  f.leave();
  f.enter("training");
  describe_training(f, o.training);
  f.leave();
  if (variant == Variant::official && o.memory.zoom.heads == ZoomOptions::Heads::group)
    refuse(
        "policy: memory.zoom_heads of sekv is group with variant official; allowed own, because the published budget "
        "is per head");
  return o;
}

}  // namespace kvkeep
