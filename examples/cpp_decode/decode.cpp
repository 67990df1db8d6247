// Generate text with a package of AOTInductor, without Python: `decode PACKAGE TOKENS NUM_BLOCKS PROMPT...`.
//
// The package calls vattn's ops by name, so a program that runs it must register them. These are the two that a step of
// a plain fp32 model needs, in the fewest operations of torch; what they do not know they refuse. A server would put its
// own kernels here. What each argument means is documented with `vattn::attention` and in docs/five-tensors.md.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

using at::Tensor;
using std::optional;
using std::string;

constexpr int64_t kBlockSize = 16;  // vattn's default; a request in a config says so where it is another

// ---- The request of a layer: `vattn1 name=value ...`, fields at their defaults left out. ----

struct Request {
  double scale = 0;
  bool quantised = false;  // FP8 output with one given scale

  explicit Request(const string& text) {
    std::istringstream words(text.substr(0, text.find(" # ")));
    string word;
    words >> word;
    TORCH_CHECK(word == "vattn1", "a request of version ", word, "; this program reads vattn1");
    const std::map<string, std::vector<string>> known = {
        {"num_heads", {}}, {"num_kv_heads", {}}, {"head_size", {}}, {"head_size_v", {}}, {"scale", {}}, {"backend", {}},
        {"dtype", {"float32"}}, {"kv_cache_dtype", {"float32"}}, {"output_format", {"none", "fp8_static"}}};
    while (words >> word) {
      const auto equals = word.find('=');
      const string name = word.substr(0, equals), value = word.substr(equals + 1);
      const auto found = known.find(name);
      const bool served = found != known.end() &&
          (found->second.empty() || std::count(found->second.begin(), found->second.end(), value));
      TORCH_CHECK(served, "a layer with ", word, "; this program serves plain causal fp32 layers: extend Request");
      if (name == "scale") scale = std::stod(value);
      if (name == "output_format") quantised = value == "fp8_static";
    }
  }
};

// ---- The ops. ----

void kv_cache_update(const Tensor& key, const Tensor& value, Tensor& key_cache, const optional<Tensor>& value_cache,
                     const Tensor& slot_mapping, const optional<Tensor>&, const optional<Tensor>&, string config) {
  Request{config};
  const Tensor rows = (slot_mapping >= 0).nonzero().squeeze(1);  // padding has slot -1
  const Tensor slots = slot_mapping.index_select(0, rows);
  const Tensor block = slots.div(kBlockSize, "floor"), place = slots.remainder(kBlockSize);
  key_cache.index_put_({block, place}, key.index_select(0, rows));
  Tensor(*value_cache).index_put_({block, place}, value.index_select(0, rows));
}

void attention(const Tensor& query, const Tensor& key_cache, const optional<Tensor>& value_cache,
               const Tensor& query_start_loc, const Tensor& seq_lens, const Tensor& block_table, Tensor& output,
               const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>& output_scale,
               const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&,
               const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&, const optional<Tensor>&,
               const optional<Tensor>&, const optional<Tensor>&, at::TensorList, const optional<Tensor>&,
               string config) {
  const Request request(config);
  output.zero_();
  for (int64_t i = 0; i < seq_lens.size(0); ++i) {
    const int64_t begin = query_start_loc[i].item<int64_t>(), rows = query_start_loc[i + 1].item<int64_t>() - begin;
    const int64_t length = seq_lens[i].item<int64_t>();
    if (rows <= 0 || length <= 0) continue;
    const Tensor blocks = block_table[i].slice(0, 0, (length + kBlockSize - 1) / kBlockSize);
    const auto heads_first = [](const Tensor& x) { return x.transpose(0, 1).unsqueeze(0); };  // [1, heads, n, width]
    const auto held = [&](const Tensor& cache) {
      return heads_first(cache.index_select(0, blocks).flatten(0, 1).slice(0, 0, length));
    };
    const Tensor seen = at::ones({rows, length}, at::kBool).tril(length - rows);  // the newest row sees all keys
    Tensor out = at::scaled_dot_product_attention(
        heads_first(query.slice(0, begin, begin + rows)), held(key_cache), held(*value_cache), seen, 0.0, false,
        request.scale, /*enable_gqa=*/true);
    out = out.squeeze(0).transpose(0, 1);
    if (request.quantised) out = (out / *output_scale).clamp(-448, 448);
    output.slice(0, begin, begin + rows).copy_(out);
  }
}

TORCH_LIBRARY(vattn, library) {
  library.def(
      "kv_cache_update(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!)? value_cache, Tensor slot_mapping, "
      "Tensor? k_scale, Tensor? v_scale, str config) -> ()");
  library.def(
      "attention(Tensor query, Tensor key_cache, Tensor? value_cache, Tensor query_start_loc, Tensor seq_lens, "
      "Tensor block_table, Tensor(a!) output, Tensor(b!)? output_block_scale, Tensor(c!)? lse, Tensor? output_scale, "
      "Tensor? q_scale, Tensor? k_scale, Tensor? v_scale, Tensor? alibi_slopes, Tensor? sinks, Tensor? causal_flags, "
      "Tensor? bias, Tensor? tree_id, Tensor? mm_ranges, Tensor? local_seq_lens, Tensor[] plan, Tensor(d!)? workspace, "
      "str config) -> ()");
  library.impl("kv_cache_update", c10::DispatchKey::CPU, TORCH_FN(kv_cache_update));
  library.impl("attention", c10::DispatchKey::CPU, TORCH_FN(attention));
}

// ---- The loop: prompts in one step, then a token of each request a step. ----

Tensor ints(const std::vector<int64_t>& values, at::ScalarType dtype = at::kInt) {
  return at::tensor(values, at::kLong).to(dtype);
}

int main(int argc, char** argv) {
  if (argc < 5) {
    std::fprintf(stderr, "decode PACKAGE TOKENS NUM_BLOCKS PROMPT...\n");
    return 2;
  }
  c10::InferenceMode guard;
  torch::inductor::AOTIModelPackageLoader package(argv[1]);
  const int64_t steps = std::stoll(argv[2]), num_blocks = std::stoll(argv[3]);

  std::vector<std::vector<int64_t>> texts;  // a token of this model is a byte, and 0 begins a text
  for (int i = 4; i < argc; ++i) {
    texts.push_back({0});
    for (const char* c = argv[i]; *c; ++c) texts.back().push_back(static_cast<unsigned char>(*c));
  }
  // Each request holds the blocks of its longest text; block 0 stays free.
  const int64_t count = texts.size();
  std::vector<std::vector<int64_t>> blocks(count);
  int64_t next = 1, width = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t most = (static_cast<int64_t>(texts[i].size()) + steps + kBlockSize - 1) / kBlockSize;
    for (int64_t j = 0; j < most; ++j) blocks[i].push_back(next++);
    width = std::max(width, most);
  }
  if (next > num_blocks) {
    std::fprintf(stderr, "%lld blocks for texts that need %lld\n", (long long)num_blocks, (long long)next);
    return 2;
  }
  Tensor table = at::zeros({count, width}, at::kInt);
  for (int64_t i = 0; i < count; ++i) table[i].slice(0, 0, blocks[i].size()).copy_(ints(blocks[i]));

  std::vector<Tensor> caches;  // keys and values of every layer, in the order of the package's inputs
  const auto metadata = package.get_metadata();
  std::istringstream sizes(metadata.at("caches"));
  int64_t layers, heads, head_size;
  sizes >> layers >> heads >> head_size;
  for (int64_t i = 0; i < 2 * layers; ++i) caches.push_back(at::zeros({num_blocks, kBlockSize, heads, head_size}));

  std::vector<int64_t> cached(count, 0);
  for (int64_t step = 0; step < steps; ++step) {
    std::vector<int64_t> ids, positions, slots, starts{0}, lengths, last;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t place = cached[i]; place < static_cast<int64_t>(texts[i].size()); ++place) {
        ids.push_back(texts[i][place]);
        positions.push_back(place);
        slots.push_back(blocks[i][place / kBlockSize] * kBlockSize + place % kBlockSize);
      }
      cached[i] = texts[i].size();
      starts.push_back(ids.size());
      lengths.push_back(cached[i]);
      last.push_back(ids.size() - 1);
    }
    std::vector<Tensor> inputs = {ints(ids, at::kLong),       ints(positions, at::kLong), ints(last, at::kLong),
                                  ints(starts),               ints(lengths),              table,
                                  ints(slots, at::kLong),     ints(positions, at::kLong)};
    inputs.insert(inputs.end(), caches.begin(), caches.end());
    const Tensor tokens = package.run(inputs)[0];
    for (int64_t i = 0; i < count; ++i) texts[i].push_back(tokens[i].item<int64_t>());
  }
  for (const auto& text : texts) {
    for (size_t i = 1; i < text.size(); ++i) std::printf("%02x", static_cast<unsigned>(text[i]));
    std::printf("\n");
  }
  return 0;
}
