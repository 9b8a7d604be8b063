// Products with weights that are packed once, in every number format; packing, and reading rows back.
#include "dtypes.h"
#include "product.h"
#include "quantized.h"

namespace gllm {
namespace {

template <class Element>
void pack(const Element* weight, int64_t outputs, int64_t inner, char* packed) {
  using Format = Dense<Element>;
  const int64_t units = divide_up(inner, Format::ELEMENTS);
  parallel_for(divide_up(outputs, COLUMNS), [&](int64_t panel) {
    for (int64_t column = 0; column < COLUMNS; column++) {
      const int64_t output = panel * COLUMNS + column;
      for (int64_t unit = 0; unit < units; unit++) {
        const uint32_t own = output < outputs ? Format::unit_of(weight + output * inner, unit, inner) : 0;
        memcpy(packed + ((panel * units + unit) * COLUMNS + column) * 4, &own, 4);
      }
    }
  });
}

template <class Element>
void unpack_row(const char* packed, int64_t inner, int64_t id, Element* row) {
  constexpr int ELEMENTS = Dense<Element>::ELEMENTS;
  const int64_t units = divide_up(inner, ELEMENTS);
  for (int64_t unit = 0; unit < units; unit++) {
    const char* from = packed + ((id / COLUMNS * units + unit) * COLUMNS + id % COLUMNS) * 4;
    const int64_t first = unit * ELEMENTS;
    memcpy(row + first, from, inner - first >= ELEMENTS ? 4 : sizeof(Element));
  }
}

template <class Format, class Element>
void multiply(const Operands<Element>& operands) {
  Product<Format, Element>(operands).run();
}

}  // namespace

// A format's number: 2 * kind (0 dense, 1 in 8 bits, 2 in 4 bits) + (1 if rows and outputs are bfloat16, else float32).
template <class Work>
void of_format(int32_t format, Work&& work) {
  auto kinds = [&]<class Element>(Element) {
    if (format / 2 == 0) work.template operator()<Dense<Element>, Element>();
    if (format / 2 == 1) work.template operator()<Quantized<Element, 8>, Element>();
    if (format / 2 == 2) work.template operator()<Quantized<Element, 4>, Element>();
  };
  if constexpr (BFLOAT16)
    if (format % 2) return kinds(bf16{});
  if constexpr (FLOAT32)
    if (format % 2 == 0) return kinds(float{});
  abort();
}

}  // namespace gllm

using namespace gllm;

// weight [outputs][inner] -> packed, dense. Bfloat16 where `half`, else float32.
extern "C" void gllm_pack(int32_t half, const void* weight, int64_t outputs, int64_t inner, void* packed) {
  if (half)
    pack(static_cast<const bf16*>(weight), outputs, inner, static_cast<char*>(packed));
  else
    pack(static_cast<const float*>(weight), outputs, inner, static_cast<char*>(packed));
}

// Rows ids [count] of a dense packed weight -> rows [count][inner].
extern "C" void gllm_unpack_rows(int32_t half, const void* packed, int64_t inner, const int64_t* ids, int64_t count,
                                 void* rows) {
  const char* from = static_cast<const char*>(packed);
  parallel_for(count, [&](int64_t index) {
    if (half)
      unpack_row(from, inner, ids[index], static_cast<bf16*>(rows) + index * inner);
    else
      unpack_row(from, inner, ids[index], static_cast<float*>(rows) + index * inner);
  });
}

// x [rows][inner] -> y [rows][outputs], rows `x_stride` and `y_stride` elements apart, for a packed weight of a format.
// bias [outputs] may be null. `widened`: y is float32, of the results as the format has them.
extern "C" void gllm_linear(int32_t format, const void* x, int64_t x_stride, int64_t rows, const void* weight,
                            int64_t inner, int64_t outputs, const void* bias, void* y, int64_t y_stride,
                            int32_t widened) {
  if (rows == 0) return;
  of_format(format, [&]<class Format, class T>() {
    multiply<Format, T>({static_cast<const T*>(x), x_stride, rows, static_cast<const char*>(weight), inner, outputs,
                         static_cast<const T*>(bias), y, y_stride, widened != 0});
  });
}
