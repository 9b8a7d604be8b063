-- Ends jobs: terminal event, record, entry and cancel wish, each job in one go.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  worker; then 6 per row: id, epoch, n, stream, entry, event
-- Returns  status and n, flat, per row:
--   OK       ended, with exactly one terminal event
--   FENCED   the job is not this worker's any more (or had ended): drop it silently
--   GAP      Redis has n tokens, not the reply's: append from n, then finish again
--   ERR <text>  ended, but its reply could not be written; there is a dead letter

local worker = ARGV[1]

local function finish(row)
  local record = fence(row.id, row.epoch, worker)
  if not record then return 'FENCED', 0 end
  if record.n ~= row.n then return 'GAP', record.n end
  local problem = end_job(row.id, row.event, row.stream, row.entry, worker)
  if problem then
    bury({reason = 'unpublishable', error = problem, attempts = record.attempts, worker = worker, stream = row.stream,
          fields = {id = row.id}})
    return 'ERR ' .. problem, record.n
  end
  return 'OK', record.n
end

local answers = {}
for i = 2, #ARGV, 6 do
  local row = {id = ARGV[i], epoch = ARGV[i + 1], n = tonumber(ARGV[i + 2]), stream = ARGV[i + 3], entry = ARGV[i + 4],
               event = ARGV[i + 5]}
  local status, n
  local problem = guarded(function() status, n = finish(row) end)
  answers[#answers + 1] = problem and 'ERR ' .. problem or status
  answers[#answers + 1] = n or 0
end
return answers
