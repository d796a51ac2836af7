// Hover texts, in plain words.

export const PROBLEMS = {
  "no frontend answers": "No frontend answers. Requests are not being answered now; the server restarts its frontends by itself.",
  "the store does not answer": "The store does not answer. Until it does, the figures of the arena and of items are missing.",
};

export const OUTCOMES = {
  hit: ["found", "The features were in the arena: nothing was decoded or computed again."],
  joined: ["shared", "Another request was making the same features; this one waited for them, and they were made once."],
  fetched: ["from a tier", "Another machine or the disk had the features; they were copied, not computed."],
  made: ["made", "The features were new: a worker decoded the file and computed them."],
  failed: ["failed", "The features could not be made, for example of a broken file."],
};

export const STATES = {
  idle: "Nothing of this stage ran in the last five seconds.",
  busy: "The stage works, and nothing waits for it.",
  waiting: "Requests or jobs wait for this stage now.",
};

export const FIGURES = {
  "Requests/ended": "Requests that ended in each second, on average over five seconds.",
  "Requests/in flight": "Requests that are being answered now.",
  "Requests/not ok": "Requests that ended with an error, or whose client left, in each second.",
  "Gate/waiting": "Requests that wait now, for space in the arena or for a permit.",
  "Gate/wait p99": "99 of 100 requests waited at most this long for space in the arena.",
  "Gate/sent away": "Requests that were refused in each second, because the server was full.",
  "Media/items": "Images, clips and videos that requests contained, in each second. An item that a request repeats counts once.",
  "Media/found": "The part of these items whose features were in the arena already.",
  "Media/arriving": "Bytes of media files that arrive in each second.",
  "Media/copied": "Bytes that all stages copy in memory in each second. For items that are found, almost none.",
  "Preprocessing/made": "Items whose features workers made, in each second.",
  "Preprocessing/running": "Jobs that workers do now.",
  "Preprocessing/queued": "Jobs that wait for a worker.",
  "Preprocessing/decode p50": "Half of the files were decoded in at most this time.",
  "Engine/running": "Requests that the model computes now.",
  "Engine/waiting": "Requests that wait for the model.",
  "Engine/encoded": "Items that the model's encoder computed, in each second. Items with stored embeddings need no encoder.",
  "Engine/steps": "Steps of the model in each second; a step computes tokens of many requests.",
  "Engine/KV in use": "The used part of the engine's KV cache.",
  "Engine/tokens": "Tokens that the engine computed in each second.",
  "Answers/tokens": "Tokens of answers in each second.",
  "Answers/TTFT p50": "Half of the answers had their first token in at most this time after the request arrived.",
  "Answers/TTFT p99": "99 of 100 answers had their first token in at most this time.",
  "Answers/ITL p50": "Half of the later tokens came at most this long after the token before.",
};

export const PROCESSES = {
  frontend: "Reads requests, finds or requests features, and sends answers.",
  preprocess: "A confined worker, which decodes files and computes features.",
  core: "Decides which requests the model computes in each step.",
  worker: "Runs the model.",
  store: "Keeps features and embeddings in the shared arena.",
  tier: "Copies features from other machines or a disk.",
};

export const STAGES = {
  "read body": "The request arrives from the client.",
  "parse json": "The JSON of the request is read.",
  tokenize: "The text becomes tokens.",
  digest: "Each item gets its key: a digest of its bytes.",
  fetch: "Media files are downloaded from their URLs.",
  acquire: "The store is asked for the features of all items. Those that it has are pinned, without a copy.",
  plan: "The sizes of features are computed from the headers of files.",
  "into the arena": "Bytes of new files are copied into the shared arena, for the workers.",
  "room for features": "The request waits until the arena has space for its new features.",
  "wait for a permit": "The request waits until fewer requests are being prepared.",
  "queue jobs": "New features are requested from the workers.",
  "wait for features": "The frontend waits until workers have made the new features.",
  "wait for embeddings": "The frontend waits for the encoder.",
  "read container": "A worker reads the structure of the file.",
  decode: "A worker decodes the file to pixels or samples.",
  process: "A worker computes the features, and writes them into the arena.",
  "first token": "From the hand-over to the engine to the first token of the answer.",
  "first byte": "From the hand-over to the engine to the first byte of the answer.",
  accept: "The engine takes the request and pins its features.",
  form: "The engine prepares the response format.",
  encode: "The model's encoder computes embeddings of an item.",
  "copy embeddings": "Embeddings from the arena are used: no encoder ran.",
  prefill: "The model computes the prompt.",
  "decode tokens": "The model computes the tokens of the answer, one after the other.",
};

export const KINDS = {
  raw: "Bytes of files, until features are made of them.",
  features: "Inputs of the encoder, made from files. A hit finds these.",
  embeddings: "Outputs of the encoder. With them, an item needs no encoder.",
  records: "Conversations and other small records.",
};

export const PARTS = [
  ["pinned", "pinned", "In use by a request: it stays."],
  ["evictable", "evictable", "Kept for later requests: a hit finds it, and new items may replace it."],
  ["promised", "pinned and reserved", "The line shows the space in use, with the space that admitted requests may still fill."],
];
