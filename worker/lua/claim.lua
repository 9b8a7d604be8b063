-- Hands out jobs: promotes delayed ones, takes over what was released or lost its worker, then reads new entries.
-- KEYS[1]  the queue's prefix; KEYS[2…] the job streams in scan order
-- ARGV[1]  worker   ARGV[2] want: the most jobs to hand out   ARGV[3] lease in ms
-- ARGV[4]  '1' to scan for expired entries too   ARGV[5] '1' to take up own pending entries that are not active
-- ARGV[6]  limit of charged attempts   ARGV[7] limit of claims; ARGV[8…] ids of the jobs active in this worker
-- Returns  {now in ms, more, suspects, groups, last id of the bell, streams, jobs, notes, left}
--   more      1: stopped before everything was dealt with     suspects  number of suspects left for later
--   groups    number of groups that were lost and made again
--   streams   per stream: name, last id delivered (read on from it), number of waiting entries
--   jobs      per job: id, stream, entry, epoch, attempts, claims, n, cached_tokens, suspect, submitted ms, taken from
--             ('' a new entry, else its last worker), body, deadline, tenant, affinity, traceparent ('' where absent)
--   notes     per event: kind, id, text. Ended here: cancelled deadline invalid unsupported too_large max_attempts.
--             Dropped: duplicate ended vanished. Others: delayed promoted dead_letter unburied (the dead letter could not
--             be written) stream (a key of the queue is not what it should be)
--   left      1: expired entries were left for want of room
-- Error words: none of its own. A lost group is made again at id 0; a stream of another type becomes a note.

local MAX_REPLY_BYTES = 16 * 1024 * 1024
local MAX_BODY_BYTES = 4 * 1024 * 1024
local MAX_HANDLED = 256 -- entries dealt with in one call, so that a million duplicates cannot block the server
local PAGE, MAX_PAGES = 100, 10

local worker, want, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local scan_expired, scan_own = ARGV[4] == '1', ARGV[5] == '1'
local max_attempts, max_claims = tonumber(ARGV[6]), tonumber(ARGV[7])
local active = {}
for i = 8, #ARGV do active[ARGV[i]] = true end

local now = now_ms()
local jobs, notes = {}, {}
local bytes, handled, suspects, groups, more, left = 0, 0, 0, 0, false, false

local function note(kind, id, text) notes[#notes + 1] = {kind, id or '', text or ''} end

local function full()
  return #jobs >= want or handled >= MAX_HANDLED or bytes > MAX_REPLY_BYTES - MAX_BODY_BYTES - 65536
end

local function usable(id) return id and #id <= 128 and id:match('^[%w._:-]+$') ~= nil end

local function alive(name)
  local heartbeat = redis.call('ZSCORE', base .. 'workers', name)
  return heartbeat and tonumber(heartbeat) >= now - lease
end

-- Unix milliseconds in plain digits; Lua's own tonumber would take 'nan', '0x10' and '1e300', too.
local function millis(name, text)
  if not text then return nil end
  if not text:match('^%d+$') or #text > 15 then error(name .. ': unix milliseconds expected, got ' .. shown(text), 0) end
  return tonumber(text)
end

-- Writes a dead letter; that this fails (`dead` is of another type) must not keep the entry in the way.
local function send_letter(item, reason, message)
  local problem = guarded(bury, {reason = reason, error = message, attempts = item.record.attempts,
    worker = item.record.worker, stream = item.stream, fields = item.fields})
  local id = item.id and item.id:sub(1, 128)
  if problem then note('unburied', id, problem) else note('dead_letter', id, reason .. ': ' .. message) end
end

-- Ends a job that nobody will run, and says so. `letter`: the reason of a dead letter to write first, or nil.
local function close(item, kind, event, letter)
  if letter then send_letter(item, letter, event.message) end
  local problem = end_job(item.id, cjson.encode(event), item.stream, item.entry, item.record.worker or worker)
  note(kind, item.id, problem or event.message)
end

local function refuse(item, code, message, letter)
  close(item, code, {type = 'error', code = code, message = message, retryable = false}, letter)
end

-- Ends a job as `done`; what was published of it before stays and is counted.
local function finish(item, reason)
  local first = redis.call('XRANGE', base .. 'out:' .. item.id, '-', '+', 'COUNT', 1)[1]
  local known, event = pcall(function() return cjson.decode(first[2][2]) end)
  local start = known and type(event) == 'table' and event or {}
  close(item, reason, {type = 'done', finish_reason = reason, stop = cjson.null, text = '',
    usage = {prompt_tokens = start.prompt_tokens or 0, cached_tokens = tonumber(item.record.cached or '0'),
             completion_tokens = item.record.n, preemptions = 0},
    timings = {queue = math.max(0, now - item.submitted) / 1000, total = 0}})
end

local function load_record(id)
  local got = redis.call('HMGET', base .. 'job:' .. id, 'state', 'entry', 'epoch', 'worker', 'attempts', 'claims', 'n',
    'cached_tokens')
  return {state = got[1], entry = got[2], epoch = tonumber(got[3] or '0'), worker = got[4] or '',
          attempts = tonumber(got[5] or '0'), claims = tonumber(got[6] or '0'), n = tonumber(got[7] or '0'),
          cached = got[8] or nil}
end

-- The reply is the truth about n and about the end; the record may be lost or older (a failover). Where the reply is
-- gone, n stays: the tokens are generated again from 0 and published from n. Returns whether the job had ended.
local function reconcile(id, record)
  local n, sequence, last = last_of(id)
  if not n then return record.state == 'ended' end
  if last == TERMINAL then return true end
  record.n = n
  record.epoch = math.max(record.epoch, sequence) -- so that our mark sorts behind those of lost epochs
  return record.state == 'ended'
end

-- Charged is who was running when the worker died; not one whose worker lives (its claim's answer was lost), and none
-- whose dead worker had another job on trial, for that one is to blame.
local function charge(item)
  local record = item.record
  if record.state ~= 'running' or record.worker == worker or alive(record.worker) then return end
  local trial = redis.call('HGET', base .. 'worker:' .. record.worker, 'trial')
  if not trial or trial == item.id then record.attempts = record.attempts + 1 end
end

-- Whether another suspect than `candidate` is on trial in this worker.
local function on_trial(candidate)
  local id = redis.call('HGET', base .. 'worker:' .. worker, 'trial')
  if not id or id == candidate then return false end
  local got = redis.call('HMGET', base .. 'job:' .. id, 'state', 'worker')
  return active[id] or (got[1] == 'running' and got[2] == worker)
end

local function take(item)
  local record, fields = item.record, item.fields
  local key, suspect = base .. 'job:' .. item.id, record.attempts > 0
  local epoch, claims = record.epoch + 1, record.claims + 1
  if item.pending then redis.call('XCLAIM', base .. item.stream, GROUP, worker, 0, item.entry, 'JUSTID') end
  redis.call('HSET', key, 'state', 'running', 'epoch', epoch, 'worker', worker, 'attempts', record.attempts,
    'claims', claims, 'n', record.n, 'entry', item.here)
  redis.call('PEXPIRE', key, DAY_MS)
  if suspect then
    redis.call('HSET', base .. 'worker:' .. worker, 'trial', item.id)
    redis.call('PEXPIRE', base .. 'worker:' .. worker, 10 * lease)
  end
  bytes = bytes + #fields.body
  jobs[#jobs + 1] = {item.id, item.stream, item.entry, epoch, record.attempts, claims, record.n, record.cached or '',
    suspect and 1 or 0, item.submitted, record.state == 'running' and record.worker or '', fields.body,
    fields.deadline or '', fields.tenant or '', fields.affinity or '', fields.traceparent or ''}
end

-- What is wrong with an entry as such; true when it has been dealt with.
local function refused(item)
  local fields = item.fields
  if fields.v and fields.v ~= '1' then
    refuse(item, 'unsupported', 'v: protocol version 1 expected, got ' .. shown(fields.v))
  elseif not fields.body then
    refuse(item, 'invalid', 'body: a JSON or MessagePack object expected, got none')
  elseif #fields.body > MAX_BODY_BYTES then
    refuse(item, 'too_large', 'body: at most ' .. MAX_BODY_BYTES .. ' bytes expected, got ' .. #fields.body, 'too_large')
  else
    return false
  end
  return true
end

-- Whether the job ends or waits here instead of running now; true when it has been dealt with.
local function settled(item)
  local fields, record = item.fields, item.record
  local deadline, not_before = millis('deadline', fields.deadline), millis('not_before', fields.not_before)
  if redis.call('EXISTS', base .. 'cancel:' .. item.id) == 1 then
    finish(item, 'cancelled')
  elseif deadline and deadline <= now then
    finish(item, 'deadline')
  elseif not_before and not_before > now and record.claims == 0 then
    park(item, not_before, now, note)
  elseif record.attempts >= max_attempts or record.claims >= max_claims then
    refuse(item, 'max_attempts', 'given up after ' .. record.attempts .. ' workers died with it and '
      .. record.claims .. ' claims', 'max_attempts')
  else
    return false
  end
  return true
end

local function admit(item)
  item.record = load_record(item.id)
  local record = item.record
  if record.entry and record.entry ~= item.here then
    drop(item.stream, item.entry)
    return note('duplicate', item.id)
  end
  if reconcile(item.id, record) then
    if record.state == 'ended' then
      drop(item.stream, item.entry)
    else
      end_job(item.id, nil, item.stream, item.entry, record.worker or worker)
    end
    return note('ended', item.id)
  end
  -- it runs here, or its live worker will renew it: it stays pending, and is looked at again when that ends
  if active[item.id] then return end
  if not item.pending and record.state == 'running' and record.worker ~= worker and alive(record.worker) then return end
  if refused(item) then return end
  charge(item)
  if settled(item) then return end
  if record.attempts > 0 and on_trial(item.id) then
    suspects = suspects + 1
    return
  end
  take(item)
end

-- One entry, whatever it is. What raises becomes a dead letter and, where the id can be used, an error for the client.
local function handle(stream, entry, flat, pending)
  local item = {stream = stream, entry = entry, here = stream .. '|' .. entry, fields = map_of(flat), pending = pending,
                submitted = tonumber(entry:match('^%d+')), record = {}}
  item.id = item.fields.id
  local problem
  if usable(item.id) then
    problem = guarded(admit, item)
    if not problem then return end
    guarded(refuse, item, 'invalid', problem, 'malformed')
  else
    send_letter(item, 'malformed', 'id: 1 to 128 characters of [A-Za-z0-9._:-] expected, got ' .. shown(item.id or ''))
  end
  drop(stream, entry)
end

-- Pending entries of `consumer` (nil: of anybody) that were idle for at least `idle` ms.
local function recover(stream, idle, consumer)
  local start, of = '-', {consumer}
  for _ = 1, MAX_PAGES do
    local found = redis.call('XPENDING', base .. stream, GROUP, 'IDLE', idle, start, '+', PAGE, unpack(of))
    for _, pending in ipairs(found) do
      if full() then
        more, left = true, left or consumer == nil
        return
      end
      local entry = redis.call('XRANGE', base .. stream, pending[1], pending[1])[1]
      if entry then
        local before = #jobs + #notes
        handle(stream, entry[1], entry[2], true)
        -- what was left alone (active, or a suspect) hides nothing behind it, and gives no reason to look again at once
        if #jobs + #notes > before then handled = handled + 1 end
      else -- trimmed or deleted while pending: nothing is left to run
        redis.call('XACK', base .. stream, GROUP, pending[1])
        handled = handled + 1
        note('vanished', '', stream .. ' ' .. pending[1])
      end
    end
    if #found < PAGE then return end
    start = '(' .. found[#found][1]
  end
  more = more or handled > 0
end

local function read_new(stream)
  while not full() do
    -- one by one: a batch would be delivered whole, however large its bodies are
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', base .. stream, '>')
    local got = reply and reply[1] and reply[1][2][1]
    if not got then return end
    handled = handled + 1 -- whatever it is, the group has moved on
    handle(stream, got[1], got[2], false)
  end
  more = true
end

local calm = quiet(now, lease)

local function scan(stream)
  recover(stream, 0, RELEASED)
  if scan_own then recover(stream, 0, worker) end
  if scan_expired and not calm then recover(stream, lease) end
end

local function safely(f, stream)
  local problem = guarded(f, stream)
  if problem and problem:find('NOGROUP', 1, true) then
    redis.call('XGROUP', 'CREATE', base .. stream, GROUP, '0', 'MKSTREAM')
    groups = groups + 1
    problem = guarded(f, stream)
  end
  if problem then note('stream', '', stream .. ': ' .. problem) end
end

local function state_of(stream)
  for _, flat in ipairs(redis.call('XINFO', 'GROUPS', base .. stream)) do
    local group = map_of(flat)
    if group.name == GROUP then return {stream, group['last-delivered-id'], waiting(stream)} end
  end
  return {stream, '0-0', 0}
end

local streams, states = {}, {}
for i = 2, #KEYS do streams[i - 1] = KEYS[i]:sub(#base + 1) end
local problem = guarded(promote, now, note)
if problem then note('stream', '', 'delayed: ' .. problem) end
for _, stream in ipairs(streams) do safely(scan, stream) end
for _, stream in ipairs(streams) do safely(read_new, stream) end
for _, stream in ipairs(streams) do guarded(function() states[#states + 1] = state_of(stream) end) end
local bell = '0-0'
guarded(function()
  local last = redis.call('XREVRANGE', base .. 'bell', '+', '-', 'COUNT', 1)[1]
  if last then bell = last[1] end
end)
return {now, more and 1 or 0, suspects, groups, bell, states, jobs, notes, left and 1 or 0}
