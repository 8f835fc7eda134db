// What a kernel says: failed assertions, which become errors of the launch, and printed values.
#pragma once

#include <stdio.h>

#include <stdexcept>

#include "types.h"

namespace npu_triton {

[[noreturn]] static void fail(const Program& program, const char* message) {
  char text[512];
  snprintf(text, sizeof(text), "device-side assertion failed in program (%d, %d, %d): %s", program.x, program.y,
           program.z, message);
  throw std::runtime_error(text);
}

static void print_value(long long value, bool hex, bool is_signed, unsigned bytes) {
  const unsigned long long unsigned_value = (unsigned long long)(value) & (bytes == 8 ? ~0ull : (1ull << (8 * bytes)) - 1);
  if (hex) printf("0x%0*llx\n", int(2 * bytes), unsigned_value);
  else if (is_signed) printf("%lld\n", value);
  else printf("%llu\n", unsigned_value);
}
static void print_value(double value, bool hex, bool, unsigned bytes) {
  if (!hex) printf("%f\n", value);
  else if (bytes == 8) print_value((long long)(bits<int64_t>(value)), true, false, 8);
  else print_value((long long)(bits<int32_t>(float(value))), true, false, 4);
}
static void print_value(const void* value, bool, bool, unsigned) { printf("%p\n", value); }

}  // namespace npu_triton
