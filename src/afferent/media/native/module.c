/* What Python calls: all that is handed over is checked here, before a byte is read or written. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "resample.h"
#include "unfilter.h"

#define MOST_TAPS (1 << 20)
#define MOST_SHIFT 30

enum { ACROSS, ACROSS_WEIGHTS, DOWN, DOWN_WEIGHTS, NUM_TABLES };

static int refuse(const char *why) {
    PyErr_SetString(PyExc_ValueError, why);
    return -1;
}

static int is_of_bytes(const Py_buffer *view) {
    return view->itemsize == 1 && view->shape && view->strides;
}

static int check_source(const Py_buffer *view, Source *source) {
    if (!is_of_bytes(view) || view->ndim != 3 || view->shape[2] != CHANNELS)
        return refuse("pixels are (rows, columns, 3) bytes");
    if (!view->shape[0] || !view->shape[1]) return refuse("no pixels");
    source->bytes = view->buf;
    source->rows = (size_t)view->shape[0];
    source->columns = (size_t)view->shape[1];
    source->row_step = view->strides[0];
    source->channel_step = view->strides[2];
    /* The step between columns is anything where there is one. */
    source->is_planar = source->columns == 1 || view->strides[1] == 1;
    if (!source->is_planar && (view->strides[1] != CHANNELS || view->strides[2] != 1))
        return refuse("pixels that are scattered");
    return 0;
}

static int check_axis(const Py_buffer *starts, const Py_buffer *weights, size_t length, Axis *axis) {
    axis->starts = starts->buf;
    axis->weights = weights->buf;
    axis->size = length;
    if (!axis->starts) return 0; /* as it is */
    axis->size = (size_t)starts->len / sizeof(int32_t);
    const size_t num_weights = (size_t)weights->len / sizeof(int32_t);
    if (!axis->size || !num_weights || num_weights % axis->size)
        return refuse("weights that are not so many for each start");
    if (num_weights / axis->size > MOST_TAPS || axis->shift < 1 || axis->shift > MOST_SHIFT)
        return refuse("weights out of range");
    axis->taps = (int)(num_weights / axis->size);
    for (size_t i = 0; i < num_weights; i++)
        if (axis->weights[i] > MOST_WEIGHT || axis->weights[i] < -MOST_WEIGHT)
            return refuse("a weight out of range");
    int64_t least = 0;
    for (size_t i = 0; i < axis->size; i++) {
        if (axis->starts[i] < least || (size_t)axis->starts[i] + (size_t)axis->taps > length)
            return refuse("starts that fall, or lead outside");
        least = axis->starts[i];
    }
    return 0;
}

/* Where each index of some dimensions leads to, the last of them fastest. */
static ptrdiff_t *offsets(const Py_ssize_t *shape, const Py_ssize_t *strides, int ndim,
                          size_t count) {
    ptrdiff_t *at = PyMem_Malloc((count ? count : 1) * sizeof *at);
    if (!at) {
        PyErr_NoMemory();
        return NULL;
    }
    for (size_t i = 0; i < count; i++) {
        size_t rest = i;
        at[i] = 0;
        for (int dim = ndim - 1; dim >= 0; dim--) {
            at[i] += (ptrdiff_t)(rest % (size_t)shape[dim]) * strides[dim];
            rest /= (size_t)shape[dim];
        }
    }
    return at;
}

static int check_target(const Py_buffer *view, size_t height, size_t width, Target *target) {
    if (!is_of_bytes(view) || view->ndim < 3 || view->ndim % 2 == 0 || view->shape[0] != CHANNELS)
        return refuse("the target is (3, rows ..., columns ...) bytes");
    const int half = view->ndim / 2, last = view->ndim - 1;
    size_t rows = 1, columns = 1;
    for (int dim = 1; dim <= half; dim++) {
        rows *= (size_t)view->shape[dim];
        columns *= (size_t)view->shape[dim + half];
    }
    if (rows != height || columns != width) return refuse("the target is of another size");
    const int is_scattered = view->strides[last] != 1;
    target->run = is_scattered ? 1 : (size_t)view->shape[last];
    target->num_runs = columns / target->run;
    target->bytes = view->buf;
    target->channel_step = view->strides[0];
    target->row_at = offsets(view->shape + 1, view->strides + 1, half, rows);
    target->run_at = offsets(view->shape + 1 + half, view->strides + 1 + half,
                             half - 1 + is_scattered, target->num_runs);
    return target->row_at && target->run_at ? 0 : -1;
}

static const Variant *variant_named(const char *name) {
    const Variant *variant = next_variant(NULL);
    while (variant && strcmp(name_of(variant), name) != 0) variant = next_variant(variant);
    if (!variant) PyErr_SetString(PyExc_ValueError, "this processor has no such variant");
    return variant;
}

static PyObject *call(const Variant *variant, const Py_buffer *pixels, const Py_buffer *tables,
                      const Py_buffer *out, Axis *across, Axis *down) {
    Source source;
    Target target = {0};
    int failed = check_source(pixels, &source);
    failed = failed || check_axis(&tables[ACROSS], &tables[ACROSS_WEIGHTS], source.columns, across);
    failed = failed || check_axis(&tables[DOWN], &tables[DOWN_WEIGHTS], source.rows, down);
    failed = failed || check_target(out, down->size, across->size, &target);
    if (!failed) {
        Py_BEGIN_ALLOW_THREADS
        failed = resample(variant, &source, across, down, &target);
        Py_END_ALLOW_THREADS
        if (failed) PyErr_NoMemory();
    }
    PyMem_Free(target.row_at);
    PyMem_Free(target.run_at);
    if (failed) return NULL;
    Py_RETURN_NONE;
}

static PyObject *py_resample(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *from, *to, *result = NULL;
    const char *name;
    Py_buffer tables[NUM_TABLES] = {{0}}, pixels, out;
    Axis across = {0}, down = {0};
    if (!PyArg_ParseTuple(args, "O(z*z*i)(z*z*i)Os", &from, &tables[ACROSS],
                          &tables[ACROSS_WEIGHTS], &across.shift, &tables[DOWN],
                          &tables[DOWN_WEIGHTS], &down.shift, &to, &name))
        return NULL;
    const Variant *variant = variant_named(name);
    if (variant && PyObject_GetBuffer(from, &pixels, PyBUF_STRIDES) == 0) {
        if (PyObject_GetBuffer(to, &out, PyBUF_STRIDES | PyBUF_WRITABLE) == 0) {
            result = call(variant, &pixels, tables, &out, &across, &down);
            PyBuffer_Release(&out);
        }
        PyBuffer_Release(&pixels);
    }
    for (int i = 0; i < NUM_TABLES; i++) PyBuffer_Release(&tables[i]);
    return result;
}

static int check_filtered(const Py_buffer *rows, const Py_buffer *out, Filtered *image) {
    if (out->ndim != 3 || out->itemsize != 1 || !PyBuffer_IsContiguous(out, 'C'))
        return refuse("pixels are (rows, columns, channels) bytes, one behind the other");
    image->bytes = rows->buf;
    image->height = (size_t)out->shape[0];
    image->width = (size_t)out->shape[1];
    image->channels = (size_t)out->shape[2];
    if (image->channels != 1 && image->channels != 3 && image->channels != 4)
        return refuse("pixels have 1, 3 or 4 channels");
    if (!out->len) return refuse("no pixels");
    const size_t needed = image->height + (size_t)out->len + BEHIND;
    return (size_t)rows->len == needed ? 0 : refuse("rows of another size");
}

static PyObject *py_unfilter(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *to, *result = NULL;
    const char *name;
    Py_buffer rows, out;
    Filtered image;
    if (!PyArg_ParseTuple(args, "y*Os", &rows, &to, &name)) return NULL;
    const Variant *variant = variant_named(name);
    if (variant && PyObject_GetBuffer(to, &out, PyBUF_STRIDES | PyBUF_WRITABLE) == 0) {
        if (check_filtered(&rows, &out, &image) == 0) {
            int failed;
            Py_BEGIN_ALLOW_THREADS
            failed = unfilter(variant, &image, out.buf);
            Py_END_ALLOW_THREADS
            if (failed < 0) PyErr_NoMemory();
            if (failed > 0) refuse("a row has an unknown filter");
            if (!failed) result = Py_NewRef(Py_None);
        }
        PyBuffer_Release(&out);
    }
    PyBuffer_Release(&rows);
    return result;
}

static PyMethodDef methods[] = {
    {"unfilter", py_unfilter, METH_VARARGS, "See _native.pyi."},
    {"resample", py_resample, METH_VARARGS, "See _native.pyi."},
    {NULL, NULL, 0, NULL},
};

static int add_variants(PyObject *module) {
    PyObject *names = PyList_New(0);
    int failed = !names || PyModule_AddObjectRef(module, "VARIANTS", names);
    for (const Variant *each = next_variant(NULL); each && !failed; each = next_variant(each)) {
        PyObject *name = PyUnicode_FromString(name_of(each));
        failed = !name || PyList_Append(names, name);
        Py_XDECREF(name);
    }
    Py_XDECREF(names);
    return failed ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, add_variants}, {0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_size = 0,
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
