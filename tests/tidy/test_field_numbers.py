"""The wire's field numbers, typed by hand from the seed documents and the contract.

Clients in the field were built against these numbers. A failing line here is a broken client:
change the proto back, never this table. New fields take new numbers and a new line.
"""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor

from mindd.episodic.v1 import episodic_pb2
from mindd.mindgrid.v1 import events_pb2, failure_pb2, jobs_pb2, records_pb2
from mindd.semantic.v1 import semantic_pb2

SEMANTIC = """
Record: string id=1, string content=2, bytes payload=3, repeated float vector=4,
    map<string,string> metadata=5, Timestamp created_at=6, Timestamp valid_from=7,
    Timestamp valid_to=8, Timestamp deleted_at=9, repeated string supersedes=10, string source=11,
    uint64 version=12, optional uint64 if_version=13
UpsertRequest: string namespace=1, repeated Record records=2, string transaction_id=100
UpsertResponse: repeated string ids=1, repeated uint64 versions=2
SearchRequest: string namespace=1, string query_text=2, repeated float query_vector=3,
    uint32 top_k=4, map<string,string> filter=5, bool include_payload=6, bool include_vector=7,
    Timestamp as_of=8, bool include_invalidated=9, bool ids_only=10,
    repeated FieldPredicate predicates=11, Timestamp created_after=12, Timestamp created_before=13,
    SearchMode mode=14, uint32 rerank_candidate_k=15, Timestamp known_at=100, bool exact=101,
    bool explain=102, Fusion fusion=103
Fusion: FusionMethod method=1, float dense_weight=2, float sparse_weight=3, uint32 k=4
FieldPredicate: string key=1, PredicateOp op=2, repeated string values=3
SearchResponse: repeated Hit hits=1, bool exact=100, uint64 scanned=101
Hit: Record record=1, float score=2, Explanation explanation=100
Explanation: uint32 dense_rank=1, float dense_score=2, uint32 sparse_rank=3, float sparse_score=4
DeleteRequest: string namespace=1, string id=2, bool hard=3, string transaction_id=100
DeleteResponse: bool existed=1
ExpireRequest: string namespace=1, map<string,string> filter=2, ExpireAction action=3,
    uint32 max_rows=4, string transaction_id=100
ExpireResponse: uint64 affected=1
"""

SEMANTIC_ENUMS = """
SearchMode: SEARCH_MODE_UNSPECIFIED=0, SEARCH_MODE_DENSE=1, SEARCH_MODE_SPARSE=2,
    SEARCH_MODE_HYBRID=3
PredicateOp: PREDICATE_OP_UNSPECIFIED=0, PREDICATE_OP_EQ=1, PREDICATE_OP_NEQ=2, PREDICATE_OP_GT=3,
    PREDICATE_OP_GTE=4, PREDICATE_OP_LT=5, PREDICATE_OP_LTE=6, PREDICATE_OP_IN=7
FusionMethod: FUSION_METHOD_UNSPECIFIED=0, FUSION_METHOD_RRF=1, FUSION_METHOD_CONVEX=2
ExpireAction: EXPIRE_ACTION_UNSPECIFIED=0, EXPIRE_ACTION_INVALIDATE=1, EXPIRE_ACTION_SOFT_DELETE=2,
    EXPIRE_ACTION_HARD_DELETE=3
"""

EPISODIC = """
Event: string id=1, uint64 cursor=2, Timestamp timestamp=3, string type=4, bytes payload=5,
    map<string,string> metadata=6, string role=7, string session_id=8,
    repeated string supersedes=9, string source=10, Timestamp deleted_at=11
AppendRequest: string namespace=1, string type=2, bytes payload=3, map<string,string> metadata=4,
    string role=5, string session_id=6, string dedup_key=7, repeated string supersedes=8,
    string source=9, optional uint64 expected_cursor=100
AppendResponse: Event event=1
RangeRequest: string namespace=1, uint64 after_cursor=2, uint64 before_cursor=3, uint32 limit=4,
    bool reverse=5, Timestamp after_time=6, Timestamp before_time=7, bool include_deleted=8,
    string session_id=9, string role=10, string type=11
TailRequest: string namespace=1, uint64 after_cursor=2, bool include_historical=3,
    string session_id=100, string role=101, string type=102, bool include_deleted=103
ExpireRequest: string namespace=1, uint64 before_cursor=2, Timestamp before_time=3,
    ExpireAction action=4, uint32 max_rows=5, string transaction_id=100
ExpireResponse: uint64 affected=1
"""

EPISODIC_ENUMS = """
ExpireAction: EXPIRE_ACTION_UNSPECIFIED=0, EXPIRE_ACTION_SOFT_DELETE=1, EXPIRE_ACTION_HARD_DELETE=2
"""

FAILURE = """
Failure: uint32 code=1, string message=2
"""

RECORDS = """
Selection: map<string,string> filter=1, repeated FieldPredicate predicates=2,
    Timestamp created_after=3, Timestamp created_before=4, Timestamp as_of=5, Timestamp known_at=6,
    bool include_invalidated=7
GetRequest: string namespace=1, repeated string ids=2, Selection selection=3,
    bool include_payload=4, bool include_vector=5
GetResponse: repeated Found results=1, Timestamp read_at=2
Found: Record record=1
ListRequest: string namespace=1, Selection selection=2, uint32 page_size=3, string page_token=4,
    bool include_payload=5, bool include_vector=6, bool ids_only=7
ListResponse: repeated Record records=1, string next_page_token=2, Timestamp read_at=3
CountRequest: string namespace=1, Selection selection=2
CountResponse: uint64 count=1, Timestamp read_at=2
SearchBatchRequest: string namespace=1, repeated SearchRequest queries=2
SearchBatchResponse: repeated SearchResult results=1, Timestamp read_at=2
SearchResult: SearchResponse response=1, Failure failure=2
"""

EVENTS = """
NewEvent: string type=1, bytes payload=2, map<string,string> metadata=3, string role=4,
    string session_id=5, string dedup_key=6, repeated string supersedes=7, string source=8
AppendBatchRequest: string namespace=1, repeated NewEvent events=2,
    optional uint64 expected_cursor=3, bool include_payload=4, string transaction_id=100
AppendBatchResponse: repeated Event events=1
DescribeRequest: string namespace=1
DescribeResponse: uint64 first_cursor=1, uint64 last_cursor=2
"""

JOBS = """
JobSpec: Ingest ingest=1, Reembed reembed=2, Reindex reindex=3, Reshard reshard=4,
    Compact compact=5, Backup backup=6, Rollback rollback=7
Ingest: string source=1, string format=2, string id_column=3, string content_column=4,
    string vector_column=5, string payload_column=6, repeated string metadata_columns=7,
    uint32 batch_rows=8
Reembed: string provider=1, string model=2, string revision=3, uint32 dimensions=4,
    map<string,string> options=5
Reindex: float recall=1
Reshard: uint32 shards=1
Compact:
Backup: string target=1
Rollback:
Job: string id=1, string block=2, string namespace=3, JobSpec spec=4, JobState state=5,
    string phase=6, uint64 done=7, uint64 total=8, string unit=9, Timestamp created_at=10,
    Timestamp started_at=11, Timestamp ended_at=12, Failure failure=13,
    map<string,string> result=14, string started_by=15
StartRequest: string block=1, string namespace=2, JobSpec spec=3, string transaction_id=100
StartResponse: Job job=1
GetJobRequest: string id=1
GetJobResponse: Job job=1
ListJobsRequest: string block=1, string namespace=2, JobState state=3, uint32 page_size=4,
    string page_token=5
ListJobsResponse: repeated Job jobs=1, string next_page_token=2
CancelRequest: string id=1
CancelResponse: Job job=1
"""

JOBS_ENUMS = """
JobState: JOB_STATE_UNSPECIFIED=0, JOB_STATE_QUEUED=1, JOB_STATE_RUNNING=2, JOB_STATE_CANCELLING=3,
    JOB_STATE_SUCCEEDED=4, JOB_STATE_FAILED=5, JOB_STATE_CANCELLED=6
"""

FILES = {
    "semantic": (semantic_pb2.DESCRIPTOR, SEMANTIC, SEMANTIC_ENUMS),
    "episodic": (episodic_pb2.DESCRIPTOR, EPISODIC, EPISODIC_ENUMS),
    "failure": (failure_pb2.DESCRIPTOR, FAILURE, ""),
    "records": (records_pb2.DESCRIPTOR, RECORDS, ""),
    "events": (events_pb2.DESCRIPTOR, EVENTS, ""),
    "jobs": (jobs_pb2.DESCRIPTOR, JOBS, JOBS_ENUMS),
}

METHODS = {
    "mindd.semantic.v1.Semantic": "Upsert Search Delete Expire",
    "mindd.episodic.v1.Episodic": "Append Range* Tail* Expire",
    "mindgrid.v1.Records": "Get List Count SearchBatch",
    "mindgrid.v1.Events": "AppendBatch Describe",
    "mindgrid.v1.Jobs": "Start Get List Cancel",
}

SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BYTES: "bytes",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_FLOAT: "float",
    FieldDescriptor.TYPE_UINT32: "uint32",
    FieldDescriptor.TYPE_UINT64: "uint64",
}


def _typed(table: str) -> dict[str, list[str]]:
    lines = table.strip().replace("\n    ", " ").splitlines()
    split = [line.partition(":") for line in lines]
    return {name: [part.strip() for part in _commas(body)] for name, _, body in split}


def _commas(body: str) -> list[str]:
    # The comma inside map<string,string> has no blank behind it.
    return [part for part in body.strip().split(", ") if part]


def _shown(field: FieldDescriptor) -> str:
    message, enum = field.message_type, field.enum_type
    if message is not None and message.GetOptions().map_entry:
        return f"map<string,string> {field.name}={field.number}"
    named = message or enum
    kind = named.name if named is not None else SCALARS[field.type]
    optional = field.has_presence and message is None
    label = "repeated " if field.is_repeated else "optional " if optional else ""
    return f"{label}{kind} {field.name}={field.number}"


def _fields(message: Descriptor) -> list[str]:
    return [_shown(field) for field in message.fields]


@pytest.mark.parametrize("name", FILES)
def test_field_numbers_and_types_are_the_contracts(name: str) -> None:
    file, messages, _ = FILES[name]
    shown = {message.name: _fields(message) for message in file.message_types_by_name.values()}
    assert shown == _typed(messages)


@pytest.mark.parametrize("name", FILES)
def test_enum_numbers_are_the_contracts(name: str) -> None:
    file, _, enums = FILES[name]
    shown = {
        enum.name: [f"{value.name}={value.number}" for value in enum.values]
        for enum in file.enum_types_by_name.values()
    }
    assert shown == _typed(enums)


def _services(file: FileDescriptor) -> dict[str, str]:
    return {
        service.full_name: " ".join(
            method.name + ("*" if method.server_streaming else "") for method in service.methods
        )
        for service in file.services_by_name.values()
    }


def test_services_and_their_streams_are_the_contracts() -> None:
    shown: dict[str, str] = {}
    for file, _, _ in FILES.values():
        shown |= _services(file)
    assert shown == METHODS
