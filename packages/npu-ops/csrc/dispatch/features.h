// Instructions that a processor may have or lack, as sets of bits: how a tier says what it needs, and a machine what it has.
#pragma once

#include <cstdint>
#include <string_view>

namespace npu_ops {

// A bit for each of kFeatures.
using Features = uint64_t;

#if defined(NPU_X86_TIERS)
// What the operating system must save of the registers, as bits of XCR0.
enum class Saved : uint64_t { vectors = 0x6, wide_vectors = 0xe6, tiles = 0x60000 };
enum class Register { a, b, c, d };
// Where CPUID tells of it.
struct Feature {
  std::string_view name;
  uint32_t leaf, subleaf;
  Register in;
  int bit;
  Saved needs;
};
inline constexpr Feature kFeatures[] = {
    {"avx2", 7, 0, Register::b, 5, Saved::vectors},
    {"fma", 1, 0, Register::c, 12, Saved::vectors},
    {"f16c", 1, 0, Register::c, 29, Saved::vectors},
    {"avxvnni", 7, 1, Register::a, 4, Saved::vectors},
    {"avx512f", 7, 0, Register::b, 16, Saved::wide_vectors},
    {"avx512bw", 7, 0, Register::b, 30, Saved::wide_vectors},
    {"avx512vl", 7, 0, Register::b, 31, Saved::wide_vectors},
    {"avx512dq", 7, 0, Register::b, 17, Saved::wide_vectors},
    {"avx512vbmi", 7, 0, Register::c, 1, Saved::wide_vectors},
    {"avx512vnni", 7, 0, Register::c, 11, Saved::wide_vectors},
    {"avx512bf16", 7, 1, Register::a, 5, Saved::wide_vectors},
    {"avx512fp16", 7, 0, Register::d, 23, Saved::wide_vectors},
    {"amx_tile", 7, 0, Register::d, 24, Saved::tiles},
    {"amx_bf16", 7, 0, Register::d, 22, Saved::tiles},
    {"amx_int8", 7, 0, Register::d, 25, Saved::tiles},
    {"amx_fp16", 7, 1, Register::a, 21, Saved::tiles},
};
#elif defined(NPU_AARCH64_TIERS)
// Where Linux tells of it: the word of the auxiliary vector, and the bit.
struct Feature {
  std::string_view name;
  unsigned long word;
  int bit;
};
inline constexpr unsigned long kHwcap = 16, kHwcap2 = 26;
inline constexpr Feature kFeatures[] = {
    {"simd", kHwcap, 1}, {"dotprod", kHwcap, 20}, {"sve", kHwcap, 22}, {"sve2", kHwcap2, 1}, {"i8mm", kHwcap2, 13}, {"bf16", kHwcap2, 14},
};
#else
struct Feature {
  std::string_view name;
};
inline constexpr Feature kFeatures[] = {{"none"}};
#endif

// "avx2 fma f16c"; a name that is not in kFeatures does not compile.
consteval Features features_named(std::string_view names) {
  Features all = 0;
  while (!names.empty()) {
    const std::string_view name = names.substr(0, names.find(' '));
    names.remove_prefix(name.size() < names.size() ? name.size() + 1 : name.size());
    int i = 0;
    while (kFeatures[i].name != name) ++i;  // beyond the end is no constant
    all |= Features{1} << i;
  }
  return all;
}

// What the processor has and the operating system saves the registers of. With tiles, the process gets leave to use them.
Features features();

}  // namespace npu_ops
