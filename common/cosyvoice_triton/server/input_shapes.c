// Preloaded into tritonserver (installation.py): refuses an input whose shape promises more than a message can hold.
//
// tritonserver multiplies shape and element size in 64 bits without a check (fixed after 24.10): 2^62 floats are 0 bytes,
// which an empty input has, and a model's process ends when numpy refuses the shape. It needs no header, so that a C
// compiler alone is enough. Both front ends call this function, and so do models that call others.

typedef struct TRITONSERVER_Error Error;
typedef Error *AddInput(void *, const char *, int, const long long *, unsigned long long);

enum { INVALID_ARG = 3, MAX_BYTES = 0x7fffffff };  // gRPC's messages have at most 2^31 - 1 bytes

extern void *dlsym(void *, const char *);
extern int snprintf(char *, unsigned long, const char *, ...);
#define NEXT ((void *)-1l)  // RTLD_NEXT

Error *TRITONSERVER_InferenceRequestAddInput(
    void *request, const char *name, int datatype, const long long *shape, unsigned long long dims)
{
    AddInput *next = (AddInput *)dlsym(NEXT, "TRITONSERVER_InferenceRequestAddInput");
    unsigned (*element_size)(int) = (unsigned (*)(int))dlsym(NEXT, "TRITONSERVER_DataTypeByteSize");
    Error *(*error)(int, const char *) = (Error *(*)(int, const char *))dlsym(NEXT, "TRITONSERVER_ErrorNew");
    long long left = MAX_BYTES / (element_size(datatype) ? element_size(datatype) : 4);  // a text: 4 bytes for its length
    char message[256];
    for (unsigned long long i = 0; i < dims; i++) {
        if (shape[i] < 0 || shape[i] > left) {
            snprintf(message, sizeof message,
                     "input '%.100s': dimension %llu of its shape is %lld; an input has at most 2^31 - 1 bytes and no "
                     "negative dimension: send the shape of its data", name, i, shape[i]);
            return error(INVALID_ARG, message);
        }
        if (shape[i] > 0)  // numpy multiplies without zeros, and refuses 0 x 2^62 too
            left /= shape[i];
    }
    return next(request, name, datatype, shape, dims);
}
