/* Make the scanner known to Python as tracedoc.trace._scanner. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "events.h"

typedef struct {
    PyObject_HEAD
    Events events;
    int busy; /* a thread reads, without the interpreter's lock */
} Scanner;

static PyObject *scanner_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"seed", "factor", "frames", NULL};
    unsigned long long random[2];
    int frames;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "KKi", names, &random[0], &random[1], &frames))
        return NULL;
    if (frames < NO_FRAMES || frames > ALL_FRAMES) {
        PyErr_SetString(PyExc_ValueError, "frames is 0 (none), 1 (long ones) or 2 (all)");
        return NULL;
    }
    Scanner *self = (Scanner *)type->tp_alloc(type, 0);
    if (self != NULL) {
        uint64_t seeds[2] = {random[0], random[1]};
        events_begin(&self->events, seeds, (enum Frames)frames);
    }
    return (PyObject *)self;
}

static void scanner_dealloc(Scanner *self)
{
    PyTypeObject *type = Py_TYPE(self);
    events_end(&self->events);
    type->tp_free((PyObject *)self);
    Py_DECREF(type);
}

static PyObject *as_bytes(const List *list, size_t size)
{
    return PyBytes_FromStringAndSize(list->count ? list->items : "", (Py_ssize_t)(list->count * size));
}

/* Return the keys from `first` on as a list of tuples of bytes. */
static PyObject *new_keys(const Table *table, size_t first, int parts)
{
    PyObject *list = PyList_New((Py_ssize_t)(table->count - first));
    for (size_t number = first; list != NULL && number < table->count; number++) {
        PyObject *key = PyTuple_New(parts);
        for (int part = 0; key != NULL && part < parts; part++) {
            Slice slice = table_part(table, number, part);
            PyObject *bytes = PyBytes_FromStringAndSize((const char *)slice.at, slice.size);
            if (bytes == NULL)
                Py_CLEAR(key);
            else
                PyTuple_SET_ITEM(key, part, bytes);
        }
        if (key == NULL)
            Py_CLEAR(list);
        else
            PyList_SET_ITEM(list, (Py_ssize_t)(number - first), key);
    }
    return list;
}

PyDoc_STRVAR(scan_doc,
             "scan(buffer, begin, end)\n--\n\n"
             "Return the tables of a chunk of plain events, None where anything in it is odd.");

static PyObject *scanner_scan(Scanner *self, PyObject *args)
{
    Py_buffer buffer;
    Py_ssize_t begin, end;
    if (!PyArg_ParseTuple(args, "y*nn", &buffer, &begin, &end))
        return NULL;
    if (begin < 0 || begin > end || end > buffer.len || self->busy) {
        PyBuffer_Release(&buffer);
        PyErr_SetString(PyExc_ValueError,
                        self->busy ? "another thread is scanning" : "the chunk is not within the buffer");
        return NULL;
    }
    Events *events = &self->events;
    const uint8_t *text = buffer.buf;
    Verdict verdict;
    self->busy = 1;
    Py_BEGIN_ALLOW_THREADS
    verdict = events_read(events, text + begin, text + end);
    Py_END_ALLOW_THREADS
    self->busy = 0;
    PyBuffer_Release(&buffer);
    if (verdict == NO_MEMORY)
        return PyErr_NoMemory();
    if (verdict == ODD)
        Py_RETURN_NONE;
    return Py_BuildValue(
        "LNNNNNNNNNNNN", (long long)events->elements, as_bytes(&events->times, sizeof(Times)),
        as_bytes(&events->head, sizeof(int32_t)), as_bytes(&events->placed, sizeof(Placed)),
        as_bytes(&events->sized, sizeof(Sized)), as_bytes(&events->counted, sizeof(Counted)),
        as_bytes(&events->waits, sizeof(Waited)), as_bytes(&events->shaped, sizeof(Shaped)),
        as_bytes(&events->collectives, sizeof(Collective)), as_bytes(&events->metadata, sizeof(Span)),
        new_keys(&events->heads, events->classified, 4),
        new_keys(&events->places, events->known_places, 4), new_keys(&events->shapes, events->known_shapes, 4));
}

PyDoc_STRVAR(classify_doc, "classify(traits)\n--\n\nKeep what was new in the last chunk; one byte for each new head.");

static PyObject *scanner_classify(Scanner *self, PyObject *args)
{
    Py_buffer traits;
    if (!PyArg_ParseTuple(args, "y*", &traits))
        return NULL;
    bool kept = !self->busy && events_classify(&self->events, traits.buf, (size_t)traits.len);
    PyBuffer_Release(&traits);
    if (!kept) {
        PyErr_SetString(PyExc_ValueError, "there is one byte for each new head");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef scanner_methods[] = {
    {"scan", (PyCFunction)scanner_scan, METH_VARARGS, scan_doc},
    {"classify", (PyCFunction)scanner_classify, METH_VARARGS, classify_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot scanner_slots[] = {
    {Py_tp_doc, "Scanner(seed, factor, frames)\n--\n\nReads chunks of plain events into tables."},
    {Py_tp_new, scanner_new},
    {Py_tp_dealloc, scanner_dealloc},
    {Py_tp_methods, scanner_methods},
    {0, NULL},
};

static PyType_Spec scanner_spec = {
    .name = "tracedoc.trace._scanner.Scanner",
    .basicsize = sizeof(Scanner),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = scanner_slots,
};

PyDoc_STRVAR(longest_doc,
             "longest(times, sources, begins, weights)\n--\n\n"
             "Let the last nodes, in their order, begin no earlier than their edges allow; int64, C order.");

/* Nodes stand in an order in which they can be worked out; edges stand by the node that they lead to. */
static PyObject *longest(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer buffers[4];
    if (!PyArg_ParseTuple(args, "w*y*y*y*", &buffers[0], &buffers[1], &buffers[2], &buffers[3]))
        return NULL;
    int64_t *times = buffers[0].buf;
    const int64_t *sources = buffers[1].buf, *begins = buffers[2].buf, *weights = buffers[3].buf;
    int64_t edges = buffers[1].len / 8, nodes = buffers[2].len / 8 - 1;
    int64_t columns = edges > 0 ? buffers[3].len / 8 / edges : 0;
    int64_t before = columns > 0 ? buffers[0].len / 8 / columns - nodes : 0;
    bool fits = nodes >= 0 && before >= 0 && (nodes == 0 || (begins[0] == 0 && begins[nodes] <= edges));
    for (int64_t node = 0; fits && node < nodes && columns > 0; node++) {
        int64_t *now = times + (before + node) * columns;
        fits = begins[node] <= begins[node + 1] && begins[node + 1] <= edges;
        for (int64_t edge = begins[node]; fits && edge < begins[node + 1]; edge++) {
            fits = sources[edge] >= 0 && sources[edge] < before + node;
            const int64_t *from = times + (fits ? sources[edge] : 0) * columns, *more = weights + edge * columns;
            for (int64_t column = 0; fits && column < columns; column++) {
                int64_t reached = from[column] + more[column];
                now[column] = reached > now[column] ? reached : now[column];
            }
        }
    }
    for (int number = 0; number < 4; number++)
        PyBuffer_Release(&buffers[number]);
    if (!fits) {
        PyErr_SetString(PyExc_ValueError, "an edge leads to no node behind its source");
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyMethodDef module_methods[] = {
    {"longest", longest, METH_VARARGS, longest_doc},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&scanner_spec);
    if (type == NULL)
        return -1;
    int failed = PyModule_AddObject(module, "Scanner", type);
    if (failed)
        Py_DECREF(type);
    return failed ? failed : PyModule_AddIntConstant(module, "LAYOUT", SCANNER_LAYOUT);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, module_exec},
    {0, NULL},
};

static struct PyModuleDef module_definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "tracedoc.trace._scanner",
    .m_doc = "Scan chunks of trace events, and play programs; see native/.",
    .m_methods = module_methods,
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__scanner(void)
{
    return PyModuleDef_Init(&module_definition);
}
