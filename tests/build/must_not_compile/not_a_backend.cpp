// expect: constraints not satisfied
#include <mdkv/core/view.hpp>

struct threads_only
{
    int threads;
};

auto not_a_backend(float* data)
{
    return mdkv::in(threads_only{2}, data, 2, 8);
}
