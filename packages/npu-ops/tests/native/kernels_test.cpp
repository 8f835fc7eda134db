// Kernels without torch, on whichever processor this is compiled for, beside plain loops in double: prints the tiers that it went through and
// returns 0, or the first check that failed and returns 1. Two threads share the work of each kernel.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "dispatch/features.h"
#include "kernels/activation/activation.h"
#include "kernels/attention/attention.h"
#include "kernels/layernorm/layernorm.h"
#include "kernels/linear/linear.h"
#include "kernels/sampling/sampling.h"

#define CHECK(condition)                                                                                                            \
  do {                                                                                                                              \
    if (!(condition)) {                                                                                                             \
      std::fprintf(stderr, "%s:%d: %s is false in tier %s\n", __FILE__, __LINE__, #condition, facts_of(current_tier()).name);       \
      std::_Exit(1);                                                                                                                \
    }                                                                                                                               \
  } while (0)

using namespace npu_ops;

namespace {

const Parallel two_threads{[](int64_t n, int64_t, Body body, void* context) {
                             std::thread other(body, context, n / 2, n);
                             if (n / 2) body(context, 0, n / 2);
                             other.join();
                           },
                           [] { return 2; }};

// ---- numbers ----
float half_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31;
  const float fraction = static_cast<float>(bits & 1023) / 1024;
  const float size = exponent ? std::ldexp(1 + fraction, exponent - 15) : std::ldexp(fraction, -14);
  return bits >> 15 ? -size : size;
}

float brain_value(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, 4);
  return value;
}

constexpr Dtype kDtypes[] = {Dtype::fp32, Dtype::bf16, Dtype::fp16};
double precision(Dtype dtype) { return dtype == Dtype::fp32 ? 0x1p-24 : dtype == Dtype::bf16 ? 0x1p-8 : 0x1p-11; }

std::mt19937 random_bits(7);

// Normal numbers that the dtype holds exactly.
struct Tensor {
  Dtype dtype;
  std::vector<double> values;
  std::vector<unsigned char> bytes;

  Tensor(Dtype dtype, size_t n) : dtype(dtype), values(n), bytes(n * (dtype == Dtype::fp32 ? 4 : 2)) {
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < n; ++i) {
      const float x = normal(random_bits);
      if (dtype == Dtype::fp32) {
        std::memcpy(&bytes[4 * i], &x, 4);
      } else {
        uint32_t wide;
        std::memcpy(&wide, &x, 4);
        const uint16_t brain = static_cast<uint16_t>(wide >> 16), half = static_cast<uint16_t>(random_bits() % 0x4000 | (wide >> 31 << 15));
        std::memcpy(&bytes[2 * i], dtype == Dtype::bf16 ? &brain : &half, 2);
      }
    }
    read();
  }
  void read() {
    for (size_t i = 0; i < values.size(); ++i) {
      float wide;
      uint16_t narrow;
      if (dtype == Dtype::fp32) {
        std::memcpy(&wide, &bytes[4 * i], 4);
      } else {
        std::memcpy(&narrow, &bytes[2 * i], 2);
        wide = dtype == Dtype::bf16 ? brain_value(narrow) : half_value(narrow);
      }
      values[i] = wide;
    }
  }
  void* data() { return bytes.data(); }
  double operator[](int64_t i) const { return values[static_cast<size_t>(i)]; }
};

// Its rounding to the dtype, and the errors of sums whose terms have that size together.
bool is_close(double actual, double expected, double size, Dtype dtype) {
  return std::abs(actual - expected) <= 1.01 * precision(dtype) * std::abs(expected) + 0x1p-18 * size + 1e-7;
}

// ---- kernels ----
void products(Dtype dtype, int64_t m, int64_t n, int64_t k) {
  Tensor x(dtype, static_cast<size_t>(m * k)), w(dtype, static_cast<size_t>(n * k)), bias(dtype, static_cast<size_t>(n)),
      out(dtype, static_cast<size_t>(m * n));
  linear_tiers.chosen()({x.data(), w.data(), bias.data(), out.data(), m, n, k, k, k, n, dtype}, two_threads);
  out.read();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      double sum = bias[j], size = std::abs(sum);
      for (int64_t l = 0; l < k; ++l) {
        sum += x[i * k + l] * w[j * k + l];
        size += std::abs(x[i * k + l] * w[j * k + l]);
      }
      CHECK(is_close(out[i * n + j], sum, size, dtype));
    }
  }
}

void norms(Dtype dtype, int64_t rows, int64_t width) {
  Tensor x(dtype, static_cast<size_t>(rows * width)), w(dtype, static_cast<size_t>(width)), out(dtype, static_cast<size_t>(rows * width));
  norm_tiers.chosen()({x.data(), nullptr, w.data(), out.data(), rows, 1, width, width, width, 1e-6f, dtype, dtype, false}, two_threads);
  out.read();
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < width; ++i) squares += x[r * width + i] * x[r * width + i];
    const double scale = 1 / std::sqrt(squares / static_cast<double>(width) + 1e-6);
    for (int64_t i = 0; i < width; ++i) {
      const double expected = x[r * width + i] * scale * w[i];
      CHECK(std::abs(out[r * width + i] - expected) <= 3 * precision(dtype) * std::abs(expected) + 1e-6);
    }
  }
}

void activations(Dtype dtype, int64_t rows, int64_t width) {
  Tensor x(dtype, static_cast<size_t>(rows * 2 * width)), out(dtype, static_cast<size_t>(rows * width));
  activation_tiers.chosen()({x.data(), out.data(), rows, width, 2 * width, dtype, Activation::silu, true}, two_threads);
  out.read();
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t i = 0; i < width; ++i) {
      const double gate = x[r * 2 * width + i], expected = gate / (1 + std::exp(-gate)) * x[r * 2 * width + width + i];
      CHECK(std::abs(out[r * width + i] - expected) <= 4 * precision(dtype) * std::abs(expected) + 1e-6);
    }
  }
}

// Prompts of several requests, each attending to itself and what is before.
void prompts(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t size) {
  const std::vector<int32_t> starts{0, 1, 20, 57};
  const int64_t tokens = starts.back();
  Tensor q(dtype, static_cast<size_t>(tokens * heads * size)), k(dtype, static_cast<size_t>(tokens * kv_heads * size)),
      v(dtype, static_cast<size_t>(tokens * kv_heads * size)), out(dtype, static_cast<size_t>(tokens * heads * size));
  AttentionParams p{};
  p.out = out.data(), p.query = q.data(), p.key = k.data(), p.value = v.data();
  p.query_start_loc = starts.data();
  p.tokens = tokens, p.requests = static_cast<int64_t>(starts.size()) - 1;
  p.query_heads = heads, p.kv_heads = kv_heads, p.head_size = p.value_size = size;
  p.out_token = p.query_token = heads * size, p.out_head = p.query_head = size;
  p.key_token = p.value_token = kv_heads * size, p.key_head = p.value_head = size;
  p.scale = 0.2f, p.causal = true, p.window_left = p.window_right = -1;
  p.dtype = dtype;
  attention_tiers.chosen()(p, two_threads);
  out.read();
  for (size_t r = 0; r + 1 < starts.size(); ++r) {
    for (int64_t t = starts[r]; t < starts[r + 1]; ++t) {
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t of = h / (heads / kv_heads);
        std::vector<double> weights;
        double total = 0;
        for (int64_t s = starts[r]; s <= t; ++s) {
          double dot = 0;
          for (int64_t i = 0; i < size; ++i) dot += q[(t * heads + h) * size + i] * k[(s * kv_heads + of) * size + i];
          weights.push_back(std::exp(0.2 * dot));
          total += weights.back();
        }
        for (int64_t i = 0; i < size; ++i) {
          double expected = 0, terms = 0;
          for (int64_t s = starts[r]; s <= t; ++s) {
            const double term = weights[static_cast<size_t>(s - starts[r])] / total * v[(s * kv_heads + of) * size + i];
            expected += term;
            terms += std::abs(term);
          }
          // weights may be rounded to the dtype before the sum
          CHECK(std::abs(out[(t * heads + h) * size + i] - expected) <= 4 * precision(dtype) * terms + 1e-5);
        }
      }
    }
  }
}

void choices(int64_t rows, int64_t width) {
  Tensor logits(Dtype::fp32, static_cast<size_t>(rows * width));
  std::vector<int64_t> best(static_cast<size_t>(rows)), k(static_cast<size_t>(rows), 5);
  argmax_tiers.chosen()({logits.data(), best.data(), rows, width, width, Dtype::fp32}, two_threads);
  top_k_top_p_tiers.chosen()({static_cast<float*>(logits.data()), k.data(), false, nullptr, rows, width, width}, two_threads);
  for (int64_t r = 0; r < rows; ++r) {
    const auto row = logits.values.begin() + r * width;
    CHECK(std::max_element(row, row + width) - row == best[static_cast<size_t>(r)]);
    std::vector<double> sorted(row, row + width);
    std::sort(sorted.rbegin(), sorted.rend());
    for (int64_t i = 0; i < width; ++i) {
      const float left = static_cast<const float*>(logits.data())[r * width + i];
      CHECK(row[i] >= sorted[4] ? left == static_cast<float>(row[i]) : left == -INFINITY);
    }
  }
}

}  // namespace

int main() {
  for (int tier = 0; tier < kTiers; ++tier) {
    if (!can_run(static_cast<Tier>(tier))) continue;
    CHECK(set_tier(facts_of(static_cast<Tier>(tier)).name));
    for (const Dtype dtype : kDtypes) {
      for (const int64_t m : {1, 4, 9, 70}) products(dtype, m, 67, 131);
      products(dtype, 3, 256, 512);
      norms(dtype, 5, 131);
      activations(dtype, 3, 131);
      prompts(dtype, 4, 2, 64);
    }
    choices(3, 5003);
    std::printf("%s ", facts_of(static_cast<Tier>(tier)).name);
  }
  std::printf("all well\n");
  return 0;
}
