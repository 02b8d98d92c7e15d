// The one parameter struct of all kernels, passed by value.
//
// cupyconv/gpu/parameters.py declares the same fields for NumPy; a test holds the two layouts
// together.  1-D and 2-D convolutions are 3-D ones whose leading sizes are 1.
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
  long long stride[3];     // of the window, per spatial axis
  long long pad[3];        // zeros before the input, per spatial axis
  long long dilation[3];   // between taps, per spatial axis
  long long x_stride[5];   // elements between neighbours of x (and dx) along N, C, D, H, W
  long long w_stride[5];   // of w (and dw) along K, C, T, R, S
  long long y_stride[5];   // of y (and dy) along N, K, Z, P, Q
  long long bias_stride;   // of the bias along K, or along C in backprop_input
};

#endif
