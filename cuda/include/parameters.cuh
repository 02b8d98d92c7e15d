// The parameter struct of all kernels, passed by value.
//
// cupyconv/kernels/parameters.py declares the same fields for NumPy; a test compares the two.  1-D and
// 2-D convolutions are 3-D convolutions with leading sizes of 1.
#ifndef CUPYCONV_PARAMETERS_CUH
#define CUPYCONV_PARAMETERS_CUH

struct ConvParameters {
  long long batch;         // N
  long long groups;        // G
  long long channels;      // C / G, input channels of one group
  long long filters;       // K / G, output channels of one group
  long long input[3];      // D, H, W
  long long filter[3];     // T, R, S
  long long output[3];     // Z, P, Q
  long long stride[3];     // stride of the window, per spatial axis
  long long pad[3];        // zeros before the input, per spatial axis
  long long dilation[3];   // step between taps, per spatial axis
  long long x_stride[5];   // strides of x (and dx) in elements, along N, C, D, H, W
  long long w_stride[5];   // strides of w (and dw), along K, C, T, R, S
  long long y_stride[5];   // strides of y (and dy), along N, K, Z, P, Q
  long long bias_stride;   // stride of the bias along K, or along C in backprop_input
  long long fold_stride[3];  // strides of dx within a cell (fold.cuh), along D, H, W
};

#endif
