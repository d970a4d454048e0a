"""Hypothesis strategies for requests that no client would send on purpose."""

from hypothesis import strategies as st

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


def value_of(field):
    numbers = {
        field.CPPTYPE_INT32: st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 12),
        field.CPPTYPE_INT64: st.integers(-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT32: st.integers(0, 2**32 - 1) | st.integers(0, 12),
        field.CPPTYPE_DOUBLE: st.floats() | st.floats(-2, 2),
        field.CPPTYPE_BOOL: st.booleans(),
    }
    if field.cpp_type == field.CPPTYPE_MESSAGE:
        return messages_of(field.message_type)
    if field.type == field.TYPE_BYTES:
        return st.binary(max_size=12)
    if field.cpp_type == field.CPPTYPE_STRING:
        roles = st.sampled_from(["user", "assistant", "system", "tiny", "{}", '{"a": [1]}'])
        return roles | st.text(max_size=12)
    if field.cpp_type == field.CPPTYPE_ENUM:
        return st.sampled_from([*field.enum_type.values_by_number, 99, -1])
    return numbers[field.cpp_type]


def messages_of(descriptor):
    """Dictionaries of some of a message's fields, as its constructor takes them."""
    optional = {}
    for field in descriptor.fields:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            keys, values = (value_of(part) for part in field.message_type.fields)
            optional[field.name] = st.dictionaries(keys, values, max_size=3)
        elif field.is_repeated:
            optional[field.name] = st.lists(value_of(field), max_size=3)
        else:
            optional[field.name] = value_of(field)
    return st.fixed_dictionaries({}, optional=optional)
